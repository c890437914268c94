"""The edits of what HAProxy does with HTTP requests: what each is for, where, and why.

The rules are those of our application's backend: others of the same Serve keep their own. Only what
happens before an application is known, as headers that do not come, is the same for all.
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

# Serve decodes these as UTF-8 and answers 500 if they are not.
TEXT_HEADERS = ("traceparent", "tracestate", "x-request-id", TIMEOUT_HEADER)
# Serve's own, decoded too; with the third a client would have its request go on when it hangs up.
# No time limit is kept on a connection that is upgraded.
FOREIGN_HEADERS = (
    "x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id|x-request-disconnect.*|upgrade"
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
# The Gateway's parser would answer in plain text.
UNKNOWN_METHOD = f"http-request deny deny_status 405 unless {{ method {METHODS} }}"

# The headers, and the first 16 KB of the body: who sends a byte a second never reaches the Gateway,
# which bounds the rest of the body itself. The largest header block, 15 KB, takes 1 s at 15 KB/s.
WAIT = "http-request wait-for-body"
BEGIN_BYTES = 15 * 2**10
FIRST_BYTES = f"{WAIT} time {BEGIN_WITHIN_S}s at-least {BEGIN_BYTES}"
# HAProxy tells who waits for "100 Continue" to go on; of a body that may be too large the Gateway
# is to say so.
ASKS_BYTES = 2**20
BODY_COMES = (
    "METH_POST !{ req.hdr(expect) -m found } "
    f"or METH_POST !{{ req.hdr_val(content-length) gt {ASKS_BYTES} }}"
)
BEGIN = f"{FIRST_BYTES} if {BODY_COMES}"

# Where HAProxy sends a request again it waits for the rest of the body, as far as its buffer of
# 1 MiB holds it. To map and unmap one for each request costs 0.9 ms: some are kept for the next.
WHOLE_WITHIN_S = 60
WHOLE = f"{WAIT} time {WHOLE_WITHIN_S}s if {BODY_COMES}"
KEPT_BYTES = 16 * 2**20
# What a Gateway had when it died is asked again, if HAProxy's buffer still has it: classifying
# changes nothing. On a cluster so is what a Gateway leaves without an answer.
AGAIN = "what a Gateway had when it died is asked again"
RETRY = "retry-on conn-failure empty-response"

# Serve need not watch for the client's going away on these routes: the Gateway does, for less
# (app/http/disconnect.py).
UNWATCHED = f"http-request set-header x-request-disconnect-disabled ?1 if {IS_CLASSIFY}"

# Who is answered before the whole body is there must be told that the connection ends: the Gateway
# ends its own, and HAProxy then closes the client's.
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
    """Return the section of an application, as Serve names it; ``protocol`` is http or grpc."""
    name = f"{protocol}-{application}".replace("#", "-").replace("/", ".")
    return "backend " + re.sub(r"[^A-Za-z0-9._-]+", "_", name)


def always() -> list[Edit]:
    """Return what is no application's: slow headers, and HAProxy's answers before it knows one."""
    return [
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
            DEFAULTS,
            [f"timeout http-request {BEGIN_WITHIN_S}s", *answers(WITHOUT_PATH)],
        ),
        # Our rules are found a place by Serve's names.
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
    """Return what HAProxy does with our application's requests; ``section`` is its backend.

    Headers that Serve stumbles over go, and those that only HAProxy and the Gateway may send. Slow
    clients are cut (slow loris). ``max_requests`` are under way for each Gateway, and it refuses
    what comes beyond; None: any number. Pages of these ``origins`` read what it answers itself.
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
        # HAProxy closes a client's connection without a word when a reused one to a Gateway breaks.
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


def for_own(section: str) -> list[Edit]:
    """Return what only the HAProxy of a Serve of our own has: it speaks HTTP/1.1 alone.

    HTTP/2 has a slow loris of its own.
    """
    return [
        appended("HTTP/1.1 alone", HTTP, ["option disable-h2-upgrade"], HTTP_BIND),
        of_backend(AGAIN, section, [RETRY]),
    ]


def for_clusters(section: str, of_grpc: str) -> list[Edit]:
    """Return what a cluster's nodes have beside: what dies is made up for.

    HAProxy has requests whole before it sends them: what it does not have whole it cannot send to
    a second Gateway when the first one dies (RAY_SERVE_HAPROXY_TUNE_BUFSIZE). And one that was just
    started, and has heard of no application, says 503 where Serve says 404.
    """
    timeout_ms = int(1e3 * (gateway_timeout_s() or GATEWAY_TIMEOUT_S))
    again = [f"{RETRY} response-timeout", f"timeout server {timeout_ms}ms"]
    unknown = error_body(*ERROR_RESPONSES[503])
    return [
        Edit(
            "503 in place of 404 while no application is known",
            (r"^ *http-request return status 404 .*not found", USE_BACKEND),
            # sed's hold space has the last application's line.
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
    """Return the edit that gives our backend lines, wherever there is one."""
    return appended(purpose, section, lines, BACKEND, per=f"^{_escaped(section)}$")


def _escaped(section: str) -> str:
    return section.replace(".", r"\.")


def _text_only(name: str) -> str:
    return rf"http-request del-header {name} if {{ req.hdr({name}) -m reg [^\x20-~] }}"


def removals(texts: tuple[str, ...], foreign: str = "") -> list[str]:
    """Return the rules that take headers away: all of ours, ``foreign`` ones, and no texts."""
    names = "|".join(filter(None, (*INTERNAL_HEADERS, foreign)))
    return [*map(_text_only, texts), f"http-request del-header ^({names})$ -m reg"]
