#!/bin/sh
# Each run has a link to this file, and beside it the script of its own HAProxy. The script is run by
# the shell, so that the run's folder may lie where nothing can be executed (/tmp mounted noexec).
exec /bin/sh "${0%/*}/haproxy.sh" "$@"
