#!/bin/sh
# The metrics' tests run Debian's prometheus. Its package would start a service of the machine, so
# only its programs are taken, into the folder given (the virtual environment's bin). Where that
# fails, those tests are left out (and the test run says so).
set -u
target=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if command -v apt-get >/dev/null; then
    echo "fetching prometheus for the metrics' tests"
    if [ "$(id -u)" = 0 ]; then SUDO=; else SUDO="sudo -n"; fi
    $SUDO apt-get -qq update 2>/dev/null
    cd "$work" || exit
    # Since Debian 13 promtool is a package of its own.
    apt-get -qq download prometheus promtool 2>/dev/null || apt-get -qq download prometheus 2>/dev/null
    for package in *.deb; do dpkg-deb -x "$package" . 2>/dev/null; done
    install usr/bin/prometheus usr/bin/promtool "$target" 2>/dev/null && exit 0
fi
echo "no prometheus, and it could not be fetched: the metrics' tests will be left out"
