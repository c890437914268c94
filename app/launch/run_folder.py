"""The folder of a run: HAProxy's files, sockets and Ray's files; it is removed after the run.

Ray's default, /tmp/ray, is shared by all users and programs of a machine, and grows with every run.
Only the user can enter this folder.
"""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from app.environment import environment_value
from app.errors import ConfigError

PREFIX = "tandem-"
LOCK = "run.lock"  # held as long as the run lives
RAY, LOGS = "ray", "logs"
# HAProxy allows 97 characters for a socket's path. Serve's are 84 characters below this folder's
# parent: /tandem- and 8 random characters, / and a node's id of 56, /admin.sock.
MAX_PLACE = 13
PLACES = ("/tmp", "/var/tmp", "/dev/shm")


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Make the folder; remove it at the end, and remove those of killed runs now.

    After an error Ray's logs stay in it until the next start, and a note of the error names them.

    Raises:
        ConfigError: no place for it is writable.

    """
    folder = _made()
    with _held(folder):
        _remove_left_over(folder.parent)
        try:
            yield folder
        except Exception as error:
            _keep_logs(folder, error)
            raise
        finally:
            if not (folder / LOGS).exists():
                shutil.rmtree(folder, ignore_errors=True)


def _made() -> Path:
    for place in (*_asked_places(), *PLACES):
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    raise ConfigError(
        f"no folder for this run: {', '.join(PLACES)} cannot be written to; mount one (docker run "
        f"--tmpfs /tmp), or set TMPDIR to a folder whose name has at most {MAX_PLACE} characters"
    )


def _asked_places() -> list[str]:
    """Return the user's own places, Ray's preference first, without long names."""
    places = [environment_value(name) or "" for name in ("RAY_TMPDIR", "TMPDIR")]
    return [place for place in places if place.startswith("/") and len(place) <= MAX_PLACE]


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases however the process ends."""
    made = folder / f"{LOCK}.new"
    with made.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made.rename(folder / LOCK)  # once locked, so a file of this name is locked
        yield


def _remove_left_over(place: Path) -> None:
    """Remove the folders of runs that were killed, or that failed and left their logs."""
    for lock in place.glob(f"{PREFIX}*/{LOCK}"):  # folders of other users cannot be entered
        with contextlib.suppress(OSError), lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _keep_logs(folder: Path, error: Exception) -> None:
    """Remove all files but Ray's logs."""
    for logs in (folder / RAY).glob(f"session_[0-9]*/{LOGS}"):
        kept = logs.rename(folder / LOGS)
        error.add_note(f"Ray's logs are in {kept} until the next start.")
        for path in folder.iterdir():
            if path.is_dir() and path != kept:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in (LOCK, LOGS):
                path.unlink()
        return
