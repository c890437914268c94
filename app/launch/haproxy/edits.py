"""The edits of what HAProxy does with requests: what each is for, where, and why."""

import json

from app.graph.parameters import TIMEOUT_HEADER
from app.launch.haproxy import grpc_rules
from app.launch.haproxy.edit import Edit, appended
from app.queueing.haproxy_headers import REFUSED_HEADER, TIMEOUT_COPY

# Serve decodes these as UTF-8 and answers 500 if they are not.
TEXT_HEADERS = ("traceparent", "tracestate", "x-request-id", TIMEOUT_HEADER)
# Serve's own, decoded too; with the third a client would have its request go on when it hangs up.
# The last two are HAProxy's own (refusals, MOVED_TIMEOUT).
FOREIGN_HEADERS = (
    "x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id|x-request-disconnect.*|"
    f"{REFUSED_HEADER}|{TIMEOUT_COPY}"
)
# Serve has no time for a request then, and the Gateway alone says that one is over.
MOVED_TIMEOUT = [
    f"http-request set-header {TIMEOUT_COPY} %[req.fhdr({TIMEOUT_HEADER},1)] "
    f"if {{ req.hdr({TIMEOUT_HEADER}) -m found }}",
    f"http-request del-header {TIMEOUT_HEADER}",
]

# HAProxy itself takes what its buffer has room for (RAY_SERVE_HAPROXY_TUNE_BUFSIZE).
HEADER_BYTES = 15 * 2**10
OVERLONG = "http-request deny deny_status 400 if " + " or ".join(
    f"{{ {part},length gt {HEADER_BYTES} }}" for part in ("req.hdrs", "url")
)

# The headers, and the first 16 KB of the body: who sends a byte a second never reaches the Gateway,
# which bounds the rest of the body itself. The largest header block, 15 KB, takes 1 s at 15 KB/s.
WAIT = "http-request wait-for-body"
BEGIN_WITHIN_S, BEGIN_BYTES = 10, 15 * 2**10
FIRST_BYTES = f"{WAIT} time {BEGIN_WITHIN_S}s at-least {BEGIN_BYTES}"
BEGIN = f"{FIRST_BYTES} if METH_POST"

# Where HAProxy sends a request again it waits for the rest of the body, as far as its buffer of
# 1 MiB holds it. To map and unmap one for each request costs 0.9 ms: some are kept for the next.
WHOLE_WITHIN_S = 60
KEPT_BYTES = 16 * 2**20

# Serve need not watch for the client's going away on these routes: the Gateway does, for less
# (app/http/disconnect.py).
UNWATCHED = (
    "http-request set-header x-request-disconnect-disabled ?1 "
    "if METH_POST { path_end /v1/classify /infer }"
)

# Who is answered before the whole body is there must be told that the connection ends: HAProxy does
# not read the rest, and closes it.
CLOSED = "http-response set-header connection close if { status 401 408 413 }"

# gRPC keeps the client's deadline to itself: Serve's contexts have no trace of it.
COPY_DEADLINE = (
    "http-request set-header x-grpc-timeout %[req.hdr(grpc-timeout)] "
    "if { req.hdr(grpc-timeout) -m found }"
)
# What HAProxy answers itself, in the service's own form. Serve turns the last three into 500.
ERROR_RESPONSES = {
    400: ("bad_request", "this is not HTTP/1.1, or address or headers are over 15 KB or 100 lines"),
    408: ("slow_request", f"headers and body did not begin to arrive within {BEGIN_WITHIN_S} s"),
    502: ("broken_off", "the service broke off while it answered; try again"),
    503: ("not_ready", "no replica answers yet; try again in 1 s"),
    504: ("deadline", "the service did not answer in time; try again"),
}
# Before a request line is read there is no path, and HAProxy writes no text with variables in it.
WITHOUT_PATH = (400, 408)
# What is around an answer's code and message: in the Open Inference Protocol's form the whole error
# is one text. Each has a variable of the request, and what it is for the other routes.
AROUND = (
    ("txn.tandem_before", '"', '{"code": "'),
    ("txn.tandem_between", ": ", '", "message": "'),
    ("txn.tandem_after", '"', '", "request_id": ""}'),
)
PROTOCOL_ERRORS = [
    f"http-request set-var-fmt({name}) '{of_protocol}' if {{ path_beg /v2/ }}"
    for name, of_protocol, _ in AROUND
]
HTTP, GRPC = "frontend http_frontend", "frontend grpc_frontend"
HTTP_BIND = (
    rf"^{HTTP}\n *bind \{{\{{ config\.frontend_host \}}\}}:\{{\{{ config\.frontend_port \}}\}}$"
)
GRPC_BIND = (
    r"^ *bind \{\{ config\.grpc_frontend_host \}\}:\{\{ config\.grpc_frontend_port \}\} proto h2$"
)
BACKEND = r"\{\{ backend\.name or 'unknown' \}\}"
USE_BACKEND = rf"^ *use_backend {BACKEND} if is_{BACKEND}$"


def always(*, waits_for_bodies: bool) -> list[Edit]:
    """Return what every HAProxy of Tandem's has.

    Headers that Serve stumbles over go. Slow clients are cut (slow loris), and what HAProxy answers
    itself has the service's form. A gRPC client's deadline is copied to where the Gateway sees it
    (app/grpc/request.py). Where :mod:`app.launch.haproxy.refusals` waits for bodies, this must not.
    """
    waits = [BEGIN] if waits_for_bodies else []
    calls_wait = grpc_rules.begin_rules(FIRST_BYTES) if waits_for_bodies else []
    return [
        Edit(
            "the service's own form of HAProxy's answers: Serve's errorfile is in its place",
            (r"^ *errorfile 502 ", r"^ *errorfile 503 ", r"^ *errorfile 504 "),
            "/^ *errorfile 50[234] /d",
            absent="^ *errorfile ",
        ),
        # Of a spliced body a rest stays in HAProxy's pipe if the answer comes before it is sent on:
        # the client's connection answers nothing more, and is never closed.
        Edit(
            "bodies copied, not spliced: a client that was answered early would hang",
            (r"^ *option splice-request$", r"^ *option splice-response$"),
            "/^ *option splice-(request|response)$/d",
            absent="^ *option +splice-",
        ),
        appended(
            "the time limit of headers and the service's own form of HAProxy's answers",
            "defaults",
            [f"timeout http-request {BEGIN_WITHIN_S}s", *_answers()],
        ),
        appended(
            "the limits of HTTP requests",
            HTTP,
            [OVERLONG, *_removals(), *MOVED_TIMEOUT, *PROTOCOL_ERRORS, UNWATCHED, CLOSED, *waits],
            HTTP_BIND,
        ),
        # Serve sends request_id back, and grpcio answers INTERNAL if it cannot.
        appended(
            "the limits of gRPC calls",
            GRPC,
            [
                _text_only("request_id"),
                COPY_DEADLINE,
                *grpc_rules.frontend_rules(BEGIN_WITHIN_S),
                *calls_wait,
            ],
            per=f"^{GRPC}$",
        ),
    ]


def unlogged() -> Edit:
    """Return the edit by which HAProxy tells nobody of each request.

    Serve has it send a datagram to syslog's port on this machine, by UDP, where usually nobody
    listens, whatever ``enable_access_log`` says: a quarter of HAProxy's time for a small request.
    """
    syslog = r"^ *log 127\.0\.0\.1:514 "
    return Edit(
        "no datagram for each request",
        (r"^ *log \{\{ config\.log_target \}\} local0 info$",),
        f"/{syslog}local0 info$/d",
        absent=syslog,
    )


def for_clusters() -> list[Edit]:
    """Return what a cluster's nodes have beside: what dies is made up for.

    HAProxy has requests whole before it sends them: what it does not have whole it cannot send to
    a second Gateway when the first one dies (RAY_SERVE_HAPROXY_RETRY_ON, ..._TUNE_BUFSIZE). And one
    that was just started, and has heard of no application, says 503 where Serve says 404.
    """
    unknown = error_body(*ERROR_RESPONSES[503])
    return [
        Edit(
            "503 in place of 404 while no application is known",
            (r"^ *http-request return status 404 .*not found",),
            r"s@^( *http-request return status) 404 .*not found.*$@\1 503 "
            rf"content-type application/json hdr retry-after 1 string '{unknown}'@",
            patterns=("^ *http-request return status 503 .*not_ready",),
        ),
        appended(
            "whole requests before they are sent",
            HTTP,
            [f"{WAIT} time {WHOLE_WITHIN_S}s if METH_POST"],
        ),
        appended("kept buffers", "global", [f"tune.memory.hot-size {KEPT_BYTES}"]),
    ]


def _text_only(name: str) -> str:
    return rf"http-request del-header {name} if {{ req.hdr({name}) -m reg [^\x20-~] }}"


def _removals() -> list[str]:
    return [*map(_text_only, TEXT_HEADERS), f"http-request del-header ^({FOREIGN_HEADERS})$ -m reg"]


def _answers() -> list[str]:
    return [
        f"http-error status {status} content-type application/json {_error_text(status, *answer)}"
        + (" hdr retry-after 1" if status == 503 else "")
        for status, answer in ERROR_RESPONSES.items()
    ]


def _error_text(status: int, code: str, message: str) -> str:
    if status in WITHOUT_PATH:
        return f"string '{error_body(code, message)}'"
    before, between, after = (
        f'%[var({name},"{usual.replace(chr(34), chr(92) + chr(34))}")]' for name, _, usual in AROUND
    )
    return f"lf-string '{{\"error\": {before}{code}{between}{message}{after}}}'"


def error_body(code: str, message: str) -> str:
    """Return the service's form of an error, for answers that HAProxy gives."""
    return json.dumps({"error": {"code": code, "message": message, "request_id": ""}})


def protocol_error_body(message: str) -> str:
    """Return the Open Inference Protocol's form of an error."""
    return json.dumps({"error": message})
