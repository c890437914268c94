"""Edits of HAProxy's rules for HTTP requests, with the reason for each.

The rules are in the backend of our application; other applications of the same Serve have their
own. Only rules that act before the application is known, as for slow headers, apply to all.
"""

import re
from collections.abc import Sequence

from app.environment import GATEWAY_TIMEOUT_S, gateway_timeout_s
from app.graph.parameters import TIMEOUT_HEADER
from app.launch.haproxy.answers import (
    BEGIN_WITHIN_S,
    ERROR_RESPONSES,
    METHODS,
    PROTOCOL_ERRORS,
    WITHOUT_PATH,
    answers,
    error_body,
    of_origins,
)
from app.launch.haproxy.edit import Edit, appended
from app.launch.haproxy.refusals import HEARD, IS_CLASSIFY, http_refusals, stick_table, under_way
from app.queueing.haproxy_headers import CLOSE_HEADER, INTERNAL_HEADERS, TIMEOUT_COPY

# Serve decodes these headers as UTF-8 and answers 500 if they are not.
TEXT_HEADERS = ("traceparent", "tracestate", "x-request-id", TIMEOUT_HEADER)
# Serve's own headers, which it decodes too. With the third, a client's request would continue after
# it hangs up. An upgraded connection would have no time limit.
FOREIGN_HEADERS = (
    "x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id|x-request-disconnect.*|upgrade"
)
# Then Serve has no time limit of its own for requests; the Gateway alone ends them.
MOVED_TIMEOUT = [
    f"http-request set-header {TIMEOUT_COPY} %[req.fhdr({TIMEOUT_HEADER},1)] "
    f"if {{ req.hdr({TIMEOUT_HEADER}) -m found }}",
    f"http-request del-header {TIMEOUT_HEADER}",
]

# HAProxy itself accepts as much as its buffer holds (RAY_SERVE_HAPROXY_TUNE_BUFSIZE).
HEADER_BYTES = 15 * 2**10
OVERLONG = "http-request deny deny_status 400 if " + " or ".join(
    f"{{ {part},length gt {HEADER_BYTES} }}" for part in ("req.hdrs", "url")
)
# The Gateway's HTTP parser would answer in plain text.
UNKNOWN_METHOD = f"http-request deny deny_status 405 unless {{ method {METHODS} }}"

# Waits for the headers and the first 15 KB of the body, so that a client that sends a byte per
# second never reaches the Gateway. The Gateway bounds the rest of the body itself. The largest
# header block, 15 KB, takes 1 s at 15 KB/s.
WAIT = "http-request wait-for-body"
BEGIN_BYTES = 15 * 2**10
FIRST_BYTES = f"{WAIT} time {BEGIN_WITHIN_S}s at-least {BEGIN_BYTES}"
# HAProxy answers "100 Continue" itself. For bodies that may be too large the Gateway has to decide.
ASKS_BYTES = 2**20
BODY_COMES = (
    "METH_POST !{ req.hdr(expect) -m found } "
    f"or METH_POST !{{ req.hdr_val(content-length) gt {ASKS_BYTES} }}"
)
BEGIN = f"{FIRST_BYTES} if {BODY_COMES}"

# Where HAProxy repeats requests, it waits for the rest of the body, up to its buffer of 1 MiB.
# Mapping and unmapping a buffer for each request would cost 0.9 ms, so some are kept.
WHOLE_WITHIN_S = 60
WHOLE = f"{WAIT} time {WHOLE_WITHIN_S}s if {BODY_COMES}"
KEPT_BYTES = 16 * 2**20
# A dead Gateway's requests are sent again if they are still in HAProxy's buffer; classifying
# changes nothing. On a cluster, so are requests that a Gateway leaves unanswered.
AGAIN = "what a Gateway had when it died is asked again"
RETRY = "retry-on conn-failure empty-response"
# Loading a set takes longer than an answer; a second Gateway must not load it meanwhile.
LOAD_S = 300
IS_LOAD = (
    "{ path_sub /v2/repository/models/ } "
    "or { path_beg /inference.GRPCInferenceService/RepositoryModel }"
)
PATIENT = [
    f"http-request disable-l7-retry if {IS_LOAD}",
    f"http-request set-timeout server {LOAD_S}s if {IS_LOAD}",
]

# On these routes Serve need not watch for disconnects: the Gateway does it for less
# (app/http/disconnect.py).
UNWATCHED = f"http-request set-header x-request-disconnect-disabled ?1 if {IS_CLASSIFY}"

# A client that is answered before its whole body arrived must learn that the connection ends. The
# Gateway closes its connection, and HAProxy then closes the client's.
CLOSED = [
    f"http-response set-header connection close if {{ res.hdr({CLOSE_HEADER}) -m found }}",
    f"http-response del-header {CLOSE_HEADER}",
]
DEFAULTS, HTTP = "defaults", "frontend http_frontend"
HTTP_BIND = (
    rf"^{HTTP}\n *bind \{{\{{ config\.frontend_host \}}\}}:\{{\{{ config\.frontend_port \}}\}}$"
)
NAME = r"\{\{ backend\.name or 'unknown' \}\}"
BACKEND, USE_BACKEND = f"^backend {NAME}$", f"^ *use_backend {NAME} if is_{NAME}$"


def backend_of(protocol: str, application: str) -> str:
    """Return the name that Serve gives to an application's backend; ``protocol``: http or grpc."""
    name = f"{protocol}-{application}".replace("#", "-").replace("/", ".")
    return "backend " + re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def always() -> list[Edit]:
    """Return the edits for all applications: slow headers, and HAProxy's own answers."""
    return [
        # With splicing, bytes of a body stay in HAProxy's pipe if the answer comes first. The
        # client's connection would then hang and never be closed.
        Edit(
            "bodies copied, not spliced: a client that was answered early would hang",
            (r"^ *option splice-request$", r"^ *option splice-response$"),
            "/^ *option splice-(request|response)$/d",
            absent="^ *option +splice-",
        ),
        appended(
            "the time limit of headers and the service's own form of HAProxy's answers",
            DEFAULTS,
            [f"timeout http-request {BEGIN_WITHIN_S}s", *answers(WITHOUT_PATH)],
        ),
        # Our rules are placed by the names that Serve gives to sections.
        Edit(
            "backends named by protocol and application",
            (BACKEND,),
            "",
            absent="^backend ",
            unless="^backend (default_backend|default_grpc_backend|grpc_fallback_backend"
            r"|(http|grpc)-[A-Za-z0-9._-]+)$",
        ),
    ]


def of_requests(section: str, max_requests: int | None, origins: Sequence[str] = ()) -> list[Edit]:
    """Return HAProxy's rules for our application's requests.

    They remove headers on which Serve fails, and headers that only HAProxy and the Gateway may
    send. They disconnect slow clients (slow loris). HAProxy refuses what exceeds ``max_requests``
    under way per Gateway (None: no limit). Pages of ``origins`` may read its own responses.
    """
    limits = [
        *of_origins(origins),
        *answers(status for status in ERROR_RESPONSES if status not in WITHOUT_PATH),
        *PROTOCOL_ERRORS,
        OVERLONG,
        UNKNOWN_METHOD,
        *removals(TEXT_HEADERS, FOREIGN_HEADERS),
        *MOVED_TIMEOUT,
        UNWATCHED,
        *CLOSED,
    ]
    name = section.removeprefix("backend ")
    edits = [
        of_backend("the limits of HTTP requests", section, limits),
        # HAProxy closes a client's connection without a response if a reused one to a Gateway
        # breaks.
        Edit(
            "an answer of HAProxy's where a Gateway dies: reused connections are known to work",
            (r"^ *http-reuse always$",),
            rf"/^{_escaped(section)}$/,/^ *http-reuse /s/^( *http-reuse) always$/\1 safe/",
            patterns=("^ *http-reuse safe$",),
            per=f"^{_escaped(section)}$",
        ),
    ]
    if max_requests is not None:
        refused = [stick_table(), *HEARD, *http_refusals(name, max_requests)]
        edits.append(of_backend("the refusals (429)", section, refused))
    begins = [BEGIN] if max_requests is None else [BEGIN, *under_way(name, IS_CLASSIFY)]
    return [*edits, of_backend("the time limit of bodies", section, begins)]


def unlogged() -> Edit:
    """Return the edit that stops HAProxy's log of every request.

    Serve makes HAProxy send a UDP datagram per request to this machine's syslog port, whatever
    ``enable_access_log`` says. Usually nothing listens there. It takes a quarter of HAProxy's time
    for a small request.
    """
    syslog = r"^ *log 127\.0\.0\.1:514 "
    return Edit(
        "no datagram for each request",
        (r"^ *log \{\{ config\.log_target \}\} local0 info$",),
        f"/{syslog}local0 info$/d",
        absent=syslog,
    )


def for_own(section: str) -> list[Edit]:
    """Return the edits for the HAProxy of a local Serve, which then speaks HTTP/1.1 only.

    HTTP/2 has its own form of slow loris.
    """
    return [
        appended("HTTP/1.1 alone", HTTP, ["option disable-h2-upgrade"], HTTP_BIND),
        of_backend(AGAIN, section, [RETRY]),
    ]


def for_clusters(section: str, of_grpc: str) -> list[Edit]:
    """Return the additional edits for a cluster: requests of a Gateway that dies are repeated.

    HAProxy buffers whole requests before it sends them on, since it can only repeat those
    (RAY_SERVE_HAPROXY_TUNE_BUFSIZE). A HAProxy that has just started and knows no application
    answers 503 in place of Serve's 404.
    """
    timeout_ms = int(1e3 * (gateway_timeout_s() or GATEWAY_TIMEOUT_S))
    again = [f"{RETRY} response-timeout", f"timeout server {timeout_ms}ms", *PATIENT]
    unknown = error_body(*ERROR_RESPONSES[503])
    return [
        Edit(
            "503 in place of 404 while no application is known",
            (r"^ *http-request return status 404 .*not found", USE_BACKEND),
            # The hold space of sed has the last application's line.
            "/^ *use_backend http-/h\n"
            "/^ *http-request return status 404 .*not found/{\nx\n/use_backend/{\nx\nb\n}\nx\n"
            r"s@^( *http-request return status) 404 .*not found.*$@\1 503 "
            rf"content-type application/json hdr retry-after 1 string '{unknown}'@"
            "\n}",
        ),
        of_backend(AGAIN, section, [*again, WHOLE]),
        of_backend(f"{AGAIN}, gRPC", of_grpc, again),
        appended("kept buffers", "global", [f"tune.memory.hot-size {KEPT_BYTES}"]),
    ]


def of_backend(purpose: str, section: str, lines: list[str]) -> Edit:
    """Return an edit that adds lines to our backend, in every configuration that has it."""
    return appended(purpose, section, lines, BACKEND, per=f"^{_escaped(section)}$")


def _escaped(section: str) -> str:
    return section.replace(".", r"\.")


def _text_only(name: str) -> str:
    return rf"http-request del-header {name} if {{ req.hdr({name}) -m reg [^\x20-~] }}"


def removals(texts: tuple[str, ...], foreign: str = "") -> list[str]:
    """Return rules that remove our own headers, ``foreign`` ones, and ``texts`` not in ASCII."""
    names = "|".join(filter(None, (*INTERNAL_HEADERS, foreign)))
    return [*map(_text_only, texts), f"http-request del-header ^({names})$ -m reg"]
