"""Runs a command as an account without a home, on a root that cannot be written to.

In mounts of its own, which end with it: an empty /tmp from which nothing can be executed, and files
of its own in the place of others. Only root can make them.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

UID = 12345  # without an entry in passwd
SCRIPT = """\
set -e
while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done
shift
mount -t tmpfs -o noexec,mode=1777 tmpfs /tmp
mount -o remount,ro,bind /
exec "$@"
"""
# The interpreter may lie in root's own home: the account may read what it could not, and no more.
READING = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
Command = Sequence[str | os.PathLike[str]]


def restricted(command: Command, instead: Mapping[Path, Path]) -> list[str]:
    """Return the command line.

    Args:
        command: what is run, under the same process id.
        instead: files, and those that it sees in their place.

    """
    binds = [str(path) for old, new in instead.items() for path in (new, old)]
    account = ["--reuid", str(UID), "--regid", str(UID), "--clear-groups", *READING]
    setpriv = ["setpriv", *account, "env", "-i", f"PATH={os.environ['PATH']}", "HOME=/"]
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", SCRIPT, "sh"]
    return [*private, *binds, "--", *setpriv, *(os.fspath(part) for part in command)]


def why_not() -> str | None:
    """Return why nothing can be run so here; None if it can."""
    if os.geteuid() != 0:
        return "only root can make mounts of its own"
    try:
        done = subprocess.run(
            restricted([sys.executable, "-c", "open('/tmp/a', 'w')"], {}),
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    return None if done.returncode == 0 else f"no mounts of its own here: {done.stderr.strip()}"
