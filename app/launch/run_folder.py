"""The folder and the environment of a run, which keep it apart from other services on the machine.

The folder has HAProxy's files, sockets and Ray's files. Only the user can enter it, and it is
removed after the run. Ray's default, /tmp/ray, is shared by all users and grows with every run.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from app.environment import (
    HA_PROXY,
    HAPROXY_COMMAND,
    HAPROXY_PATH,
    HAPROXY_SECRET,
    PROJECT,
    RAY_ON_ALL_INTERFACES,
    REGIONS_FOLDER,
    UTF8,
    add_import_path,
    environment_value,
    has_haproxy,
    serve_environment,
    set_environment,
)
from app.errors import ConfigError
from app.launch.checks import free_port
from app.launch.config import ServeConfig
from app.launch.haproxy import (
    MOST_CONNECTIONS,
    SILENT_S,
    STARTER,
    HaproxyCommand,
    haproxies,
    max_connections,
)
from app.launch.log_and_metrics import logger
from app.launch.ray_features import check_protecting
from models.files import ForeignError, check_place, locked, open_ours

PREFIX = "tandem-"
LOCK = "run.lock"  # held as long as the run lives
IF_FREE = fcntl.LOCK_EX | fcntl.LOCK_NB
RAY, LOGS = "ray", "logs"
# HAProxy allows 97 characters for a socket's path. Serve's are 84 characters below this folder's
# parent: /tandem- and 8 random characters, / and a node's id of 56, /admin.sock.
MAX_PLACE = 13
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
# In the command line of a run's HAProxy: Serve's file, in a folder of the node or none.
RUN_OF_HAPROXY = re.compile(rf" -f (/\S*/{PREFIX}[^/\s]+)/(?:[^/\s]+/)?haproxy\.cfg(?: |$)")
HAPROXY_SCRIPT = "haproxy.sh"  # its name in the run's folder, also in STARTER


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Make the folder; remove it at the end, and remove those of killed runs now.

    After an error Ray's logs stay in it until the next start, and a note of the error names them.

    Raises:
        ConfigError: no place for it is writable.
    """
    folder = _made()
    with _held(folder):
        _end_orphans()
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
    """Make the folder in the user's own place, Ray's preference first, unless its name is long."""
    asked = {n: place for n in ("RAY_TMPDIR", "TMPDIR") if (place := environment_value(n))}
    usable = [p for p in asked.values() if p.startswith("/") and len(p) <= MAX_PLACE]
    for place in (*usable, *PLACES):
        with contextlib.suppress(OSError):
            check_place(place)
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            for name, wanted in asked.items():
                if wanted == place:
                    break
                if sys.platform == "linux":  # macOS itself sets one of 49 characters
                    logger.warning(
                        f"{name}={wanted} is not used, {place} is: paths of sockets are limited. "
                        f"Give a writable folder by an absolute path of at most {MAX_PLACE} "
                        "characters"
                    )
            return folder
    raise ConfigError(
        f"no folder for this run: {', '.join(PLACES)} cannot be written to; mount one (docker run "
        f"--tmpfs /tmp), or set TMPDIR to a folder whose name has at most {MAX_PLACE} characters"
    )


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases however the process ends."""
    made = folder / f"{LOCK}.new"
    with locked(made, os.O_CREAT | os.O_EXCL | os.O_RDWR):
        made.rename(folder / LOCK)  # once locked, so a file of this name is locked
        yield


def _end_orphans() -> None:
    """End each HAProxy of a run that is gone: it would hold the run's port for ever."""
    for process, line in haproxies():
        if match := RUN_OF_HAPROXY.search(line):
            # The process may have another root (a container, PrivateTmp of systemd).
            with contextlib.suppress(psutil.Error):  # Serve's manager lives, so its run does
                if (manager := process.parent()) and "ray::" in " ".join(manager.cmdline()):
                    continue
            if _is_held(Path(f"/proc/{process.pid}/root{match[1]}/{LOCK}")):
                continue
            text = "HAProxy, process %d, is ended: its run in %s is gone, and it holds the port"
            logger.warning(text, process.pid, match[1])
            with contextlib.suppress(psutil.Error):
                process.kill()
                process.wait(timeout=5)


def _is_held(lock: Path) -> bool:
    """Whether a run of this user's holds the lock; also if nobody can tell."""
    try:
        with locked(lock, operation=IF_FREE):
            return False
    except OSError as error:  # it is held, it was removed with its folder, or nobody can tell
        return not isinstance(error, FileNotFoundError | ForeignError)


def _remove_left_over(place: Path) -> None:
    """Remove the folders of runs that were killed, or that failed and left their logs."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # another user's, held
            opened = open_ours(folder, os.O_DIRECTORY)
            stack.callback(os.close, opened)
            stack.enter_context(locked(LOCK, operation=IF_FREE, folder=opened))
            shutil.rmtree(folder, ignore_errors=True)


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


def make_regions_folder(config: ServeConfig, run_dir: Path) -> None:
    """Make the folder of shared-memory regions for all Gateways, and name it in the environment.

    It is in the run's folder, which only this user can enter and which is removed after the run.
    Call this before Ray starts.
    """
    if config.settings.shared_memory:
        folder = run_dir / "regions"
        folder.mkdir(mode=0o700)
        set_environment({REGIONS_FOLDER: str(folder)}, ours=(REGIONS_FOLDER,))


@contextlib.contextmanager
def fast_serve(*, is_joining: bool = False, is_portable: bool = False) -> Iterator[HaproxyCommand]:
    """Set the environment that makes Serve fast, with an own folder for HAProxy's files.

    Enter this before ray is imported: Serve reads its environment once, at import, and the
    processes that Ray starts inherit it.

    Args:
        is_joining: whether a running cluster is joined, which is not on loopback only.
        is_portable: whether Serve's own proxy is used, which runs on every platform.

    Raises:
        ConfigError: the installed Ray is too old, or does not read a variable that protects the
            service.
    """
    with run_folder() as run_dir:
        ports = (free_port(), free_port())
        first = min(free_port(), 65_400)
        values = serve_environment(run_dir, ports) | {
            # Serve's own proxy listens here and answers requests while HAProxy has no replica. Two
            # services would share the usual ports (SO_REUSEPORT) and answer each other's requests.
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
            # The same holds for the replicas' gRPC ports, whatever Serve says of reuse. So each run
            # has its own hundred ports.
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first),
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first + 100),
            MOST_CONNECTIONS: str(max_connections()),
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(SILENT_S),
        }
        check_protecting(values)
        if is_joining:
            del values[RAY_ON_ALL_INTERFACES]
        else:
            values |= _own_token(run_dir) | {HAPROXY_SECRET: secrets.token_hex(32)}
        # The shell may have a HAPROXY_PATH of a cluster (tandem environment) or of another program,
        # without this run's limits. So it is replaced.
        portable = {HA_PROXY: "0"} if is_portable else {}
        set_environment(values | portable, ours=(HAPROXY_PATH, HAPROXY_SECRET, UTF8, *portable))
        add_import_path(PROJECT)
        (run_dir / HAPROXY_COMMAND).symlink_to(STARTER)
        command = HaproxyCommand(run_dir / HAPROXY_SCRIPT, ports)
        if has_haproxy():
            command.write()
        try:
            yield command
        finally:
            command.end_left_over()


def _own_token(run_dir: Path) -> dict[str, str]:
    """Return the variable for the secret of this run's Ray; {} if the user has set one for Ray.

    Without it Ray stores one secret for all clusters of the user in the home folder, which may not
    be writable.
    """
    if environment_value("RAY_AUTH_TOKEN", TOKEN_PATH):
        return {}
    file = run_dir / "token"
    file.touch(0o600)
    file.write_text(secrets.token_hex(32), "ascii")
    return {TOKEN_PATH: str(file)}
