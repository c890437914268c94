#!/bin/sh
# Classifies files with curl, one request each, and prints one JSON object a line.
#
#     examples/classify.sh photo.jpg other.jpg
#
# TANDEM_URL names the service (http://127.0.0.1:8000), TANDEM_KEY_FILE a file with its key.
# The exit status is 1 if the service refused a file; the error is printed in its place.
set -u

url=${TANDEM_URL:-http://127.0.0.1:8000}
failed=0

answer=$(mktemp)
trap 'rm -f "$answer"' EXIT

call() {
    # --retry waits as long as the header Retry-After of 429 and 503 says. With a file, only the
    # last attempt's answer is left.
    curl --silent --show-error --fail-with-body --retry 3 --max-time 30 --output "$answer" "$@"
}

for photo in "$@"; do
    if [ -n "${TANDEM_KEY_FILE:-}" ]; then
        # Standard input keeps the key out of the list of processes.
        printf 'Authorization: Bearer %s\n' "$(cat "$TANDEM_KEY_FILE")" |
            call --header @- --data-binary "@$photo" "$url/v1/classify?top_k=1"
    else
        call --data-binary "@$photo" "$url/v1/classify?top_k=1"
    fi || failed=1
    cat "$answer"
    echo
    : >"$answer"
done
exit $failed
