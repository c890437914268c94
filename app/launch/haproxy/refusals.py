"""Rules with which HAProxy refuses excess requests in the Gateway's place.

A refusal costs the Gateway 0.8 ms and HAProxy a tenth. This decides at ten times the load that a
machine can carry (tests/load/overload.py). The Gateway's own refusals state its current limit of
requests under way (:mod:`app.queueing.haproxy_headers`). HAProxy applies it for ``VALID_MS``, and
otherwise the settings' limit.

A stick table counts the requests to classify that HAProxy has sent on and that are unanswered. It
does not count requests that are still arriving, requests of other routes, or answered requests
whose bodies still arrive.

One excess request in ``ASK_EVERY_MS`` goes on to the Gateway. The Gateway may give it the place of
a slow upload, and its answer states the current limit. The number of requests refused meanwhile
goes along with it, or with any other request that HAProxy sends on.
"""

from app.launch.haproxy.answers import error_body, protocol_error_body
from app.queueing.haproxy_headers import LIMIT_HEADER, REFUSED_HEADER

VALID_MS = 1000  # how long a limit stated by the Gateway holds
ASK_EVERY_MS = 100
# Variables of the process: the Gateway's limit and its time, the time of the last excess request
# that went on, and the number of refusals since a request went on.
LIMIT, SAID_AT, ASKED_AT, NUM_REFUSED = (
    f"proc.tandem_{name}" for name in ("limit", "said_at", "asked_at", "refused")
)
NOW = "date(0,ms)"
REFUSAL = (
    "%[var(txn.limit)] requests are under way for each Gateway, the limit at present; "
    "try again in 1 s"
)
# The Gateway's limit is for HAProxy alone, and is removed. It is read over HTTP only: over gRPC an
# error's metadata are trailers, which HAProxy does not read; there the Gateway refuses the rest.
HEARD = [
    f"http-response set-var({LIMIT}) res.hdr({LIMIT_HEADER}),add(0) "
    f"if {{ res.hdr({LIMIT_HEADER}) -m found }}",
    f"http-response set-var({SAID_AT}) {NOW} if {{ res.hdr({LIMIT_HEADER}) -m found }}",
    f"http-response del-header {LIMIT_HEADER}",
]
# The routes that classify; those of KServe's protocols have their own error form.
IS_CLASSIFY = "METH_POST { path_end /v1/classify /infer :predict }"
IS_INFER = "{ path_end /infer :predict }"
SENT_ON, ANSWERED = "int(0)", "int(1)"  # rows of a backend's table


def stick_table() -> str:
    """Return the line of a stick table that counts tracked requests, a row for each kind."""
    return "stick-table type integer size 16 expire 1h store conn_cur"


def under_way(backend: str, is_ours: str) -> list[str]:
    """Return rules that count a request as sent on, and later as answered, until it ends."""
    counted = "{ var(txn.counted) -m bool }"
    return [
        f"http-request set-var(txn.counted) bool(true) if {is_ours}",
        f"http-request track-sc1 {SENT_ON} table {backend} if {counted}",
        f"http-response track-sc2 {ANSWERED} table {backend} if {counted}",
    ]


def http_refusals(backend: str, max_requests: int) -> list[str]:
    """Return rules with which HAProxy answers 429 where the Gateway would.

    They come before the wait for the body, which would not be read.
    """
    refusal = "http-request return status 429 content-type application/json hdr retry-after 1"
    of_protocol = f"{refusal} lf-string '{protocol_error_body(REFUSAL)}' if {IS_INFER}"
    answer = f"{refusal} lf-string '{error_body('overloaded', REFUSAL)}'"
    return refusals(backend, max_requests, IS_CLASSIFY, answer, of_protocol)


def refusals(
    backend: str, max_requests: int, is_ours: str, answer: str, first_answer: str = ""
) -> list[str]:
    """Return the rules that refuse excess requests among those that match ``is_ours``.

    Args:
        backend: the section whose table counts them.
        max_requests: the settings' limit per Gateway.
        is_ours: an HAProxy condition.
        answer: the action that refuses a request.
        first_answer: an action with its own condition that comes before ``answer``.

    """
    ours = f"if {is_ours}"
    num = f"{SENT_ON},table_conn_cur({backend}),sub(txn.answered)"
    beyond = f"{{ nbsrv({backend}) gt 0 }} {{ {num},div(txn.gateways),sub(txn.limit) ge 0 }}"
    is_full, is_refused = "{ var(txn.full) -m bool }", "{ var(txn.refused) -m bool }"
    has_refused = f"{ours} {{ var({NUM_REFUSED},0) -m int gt 0 }}"
    return [
        f"http-request set-var(txn.gateways) nbsrv({backend}) {ours}",
        f"http-request set-var(txn.answered) {ANSWERED},table_conn_cur({backend}) {ours}",
        f"http-request set-var(txn.limit) int({max_requests}) {ours}",
        f"http-request set-var(txn.limit) var({LIMIT}) {ours} {_within(SAID_AT, VALID_MS)}",
        f"http-request set-var(txn.full) bool(true) {ours} {beyond}",
        "http-request set-var(txn.refused) bool(true) "
        f"{ours} {is_full} {_within(ASKED_AT, ASK_EVERY_MS)}",
        f"http-request set-var({NUM_REFUSED}) var({NUM_REFUSED},0),add(1) {ours} {is_refused}",
        # Serve's proxy reads a log line per request, which was a third of a refusal's cost.
        f"http-request set-log-level silent {ours} {is_refused}",
        *([f"{first_answer} {is_refused}"] if first_answer else []),
        f"{answer} {ours} {is_refused}",
        f"http-request set-var({ASKED_AT}) {NOW} {ours} {is_full}",
        f"http-request set-header {REFUSED_HEADER} %[var({NUM_REFUSED})] {has_refused}",
        f"http-request set-var({NUM_REFUSED}) int(0) {has_refused}",
    ]


def _within(since: str, ms: int) -> str:
    """Return a condition: at most ``ms`` have passed since, and the clock was not set back."""
    return f"{{ {NOW},sub({since}) 0:{ms - 1} }}"
