"""The rules by which HAProxy refuses what is too much, in the Gateway's place.

A refusal costs the Gateway 0.8 ms and HAProxy a tenth: at ten times the load that a machine can
carry that is the difference (tests/load/overload.py). How many requests may be under way, the
Gateway says in its own refusals (:mod:`app.queueing.haproxy_headers`); HAProxy keeps to that for
``VALID_MS``, and without it to the settings' limit.

Requests under way are those to classify that HAProxy sent on and that have no answer yet, counted
in a stick table. Whatever else it has is not among them: requests that it still waits for, that
are none to classify, or that were answered and whose bodies still come.

Of what comes beyond, one request in ``ASK_EVERY_MS`` goes on to the Gateway, which knows more: it
may give a slow upload's place away, and it says what the limit is now. How many were refused
meanwhile goes with it, or with any other that goes on.
"""

from app.launch.haproxy.answers import error_body, protocol_error_body
from app.queueing.haproxy_headers import LIMIT_HEADER, REFUSED_HEADER

VALID_MS = 1000  # a limit that the Gateway said
ASK_EVERY_MS = 100
# Of the process: what the Gateway said and when, when one beyond the limit went on, and how many
# did not since a request went on.
LIMIT, SAID_AT, ASKED_AT, NUM_REFUSED = (
    f"proc.tandem_{name}" for name in ("limit", "said_at", "asked_at", "refused")
)
NOW = "date(0,ms)"
TOLD = (
    "%[var(txn.limit)] requests are under way for each Gateway, the limit at present; "
    "try again in 1 s"
)
# What the Gateway says is HAProxy's alone. It is heard over HTTP: over gRPC an error's metadata are
# trailers, which HAProxy does not read; there the Gateway refuses what HAProxy does not.
HEARD = [
    f"http-response set-var({LIMIT}) res.hdr({LIMIT_HEADER}),add(0) "
    f"if {{ res.hdr({LIMIT_HEADER}) -m found }}",
    f"http-response set-var({SAID_AT}) {NOW} if {{ res.hdr({LIMIT_HEADER}) -m found }}",
    f"http-response del-header {LIMIT_HEADER}",
]
# The routes that classify; those of KServe's protocols have their own form of errors.
IS_CLASSIFY = "METH_POST { path_end /v1/classify /infer :predict }"
IS_INFER = "{ path_end /infer :predict }"
SENT_ON, ANSWERED = "int(0)", "int(1)"  # rows of a backend's table, of requests that are there


def stick_table() -> str:
    """Return the line of a table that counts what is tracked, a row for each kind."""
    return "stick-table type integer size 16 expire 1h store conn_cur"


def under_way(backend: str, is_ours: str) -> list[str]:
    """Return the rules that count a request, and that it was answered, until it is gone."""
    counted = "{ var(txn.counted) -m bool }"
    return [
        f"http-request set-var(txn.counted) bool(true) if {is_ours}",
        f"http-request track-sc1 {SENT_ON} table {backend} if {counted}",
        f"http-response track-sc2 {ANSWERED} table {backend} if {counted}",
    ]


def http_refusals(backend: str, max_requests: int) -> list[str]:
    """Return the rules by which HAProxy answers 429 where the Gateway would.

    They stand before the body is waited for, which nobody will read.
    """
    refusal = "http-request return status 429 content-type application/json hdr retry-after 1"
    of_protocol = f"{refusal} lf-string '{protocol_error_body(TOLD)}' if {IS_INFER}"
    answer = f"{refusal} lf-string '{error_body('overloaded', TOLD)}'"
    return refusals(backend, max_requests, IS_CLASSIFY, answer, of_protocol)


def refusals(
    backend: str, max_requests: int, is_ours: str, answer: str, first_answer: str = ""
) -> list[str]:
    """Return the rules for requests that are ``is_ours``; ``answer`` refuses one.

    ``first_answer``, which has a condition of its own, goes before it.
    """
    ours = f"if {is_ours}"
    num = f"{SENT_ON},table_conn_cur({backend}),sub(txn.answered)"
    beyond = f"{{ nbsrv({backend}) gt 0 }} {{ {num},div(txn.gateways),sub(txn.limit) ge 0 }}"
    is_full, is_refused = "{ var(txn.full) -m bool }", "{ var(txn.refused) -m bool }"
    has_told = f"{ours} {{ var({NUM_REFUSED},0) -m int gt 0 }}"
    return [
        f"http-request set-var(txn.gateways) nbsrv({backend}) {ours}",
        f"http-request set-var(txn.answered) {ANSWERED},table_conn_cur({backend}) {ours}",
        f"http-request set-var(txn.limit) int({max_requests}) {ours}",
        f"http-request set-var(txn.limit) var({LIMIT}) {ours} {_within(SAID_AT, VALID_MS)}",
        f"http-request set-var(txn.full) bool(true) {ours} {beyond}",
        "http-request set-var(txn.refused) bool(true) "
        f"{ours} {is_full} {_within(ASKED_AT, ASK_EVERY_MS)}",
        f"http-request set-var({NUM_REFUSED}) var({NUM_REFUSED},0),add(1) {ours} {is_refused}",
        # Serve's proxy reads a line for each request: its share of a refusal's cost was a third.
        f"http-request set-log-level silent {ours} {is_refused}",
        *([f"{first_answer} {is_refused}"] if first_answer else []),
        f"{answer} {ours} {is_refused}",
        f"http-request set-var({ASKED_AT}) {NOW} {ours} {is_full}",
        f"http-request set-header {REFUSED_HEADER} %[var({NUM_REFUSED})] {has_told}",
        f"http-request set-var({NUM_REFUSED}) int(0) {has_told}",
    ]


def _within(since: str, ms: int) -> str:
    """Return the condition that so little time has passed, and that the clock was not set back."""
    return f"{{ {NOW},sub({since}) 0:{ms - 1} }}"
