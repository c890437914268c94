"""The edits by which HAProxy refuses what is too much, in the Gateway's place.

A refusal costs the Gateway 0.8 ms and HAProxy a tenth: at ten times the load that a machine can
carry that is the difference (tests/load/overload.py). How many requests may be under way, the
Gateway says in its own refusals (:mod:`app.queueing.haproxy_headers`); HAProxy keeps to that for
``VALID_MS``, and without it to the settings' limit.

Of what comes beyond, one request in ``ASK_EVERY_MS`` goes on to the Gateway, which knows more: it
may give a slow upload's place away, and it says what the limit is now. How many were refused
meanwhile goes with it, or with any other that goes on.
"""

from collections.abc import Sequence

from app.launch.haproxy import edits, grpc_rules
from app.launch.haproxy.edit import MARK, Edit, appended
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
# The routes that classify; the Open Inference Protocol's has its own form of errors.
IS_CLASSIFY, IS_INFER = "{ path_end /v1/classify /infer }", "{ path_end /infer }"


def refusals(max_requests: int) -> list[Edit]:
    """Return the edits by which HAProxy answers 429 where the Gateway would, and gRPC likewise.

    That is before the body is waited for, which nobody will read. The rules are in the frontend,
    before a backend is chosen: what is refused there does not count as there. Serve's
    configuration has the lines they stand before only when it has the backends.
    """
    return [
        appended("the limit that the Gateway says", edits.HTTP, HEARD, edits.HTTP_BIND),
        _refused_requests(max_requests),
        _refused_calls(max_requests),
    ]


def _refused_requests(max_requests: int) -> Edit:
    refusal = "http-request return status 429 content-type application/json hdr retry-after 1"
    to_infer = f"{refusal} lf-string '{edits.protocol_error_body(TOLD)}' if {IS_INFER}"
    answer = f"{refusal} lf-string '{edits.error_body('overloaded', TOLD)}'"
    rules = [
        *_rules(max_requests, IS_CLASSIFY, r" \3", answer, rf"{to_infer} \3"),
        rf"{edits.BEGIN} \3",
    ]
    return Edit(
        "the refusals (429) and the time limit of bodies, for each backend",
        (edits.USE_BACKEND, rf"^ *acl is_{edits.BACKEND} path_beg "),
        _before(r"use_backend (http-[^ ]+) if ([^ ]+)", rules),
        patterns=(
            rf"^ *http-request return status 429 .*\"code\".* {MARK}$",
            rf"^ *http-request return status 429 .*\"error\": \"%.* {MARK}$",
            f"^ *{edits.BEGIN} [^#]+ {MARK}$",
        ),
        per="^ *acl is_[^ ]+ path_beg ",
    )


def _refused_calls(max_requests: int) -> Edit:
    answer = grpc_rules.refusal(TOLD)
    of_named = _rules(max_requests, grpc_rules.IS_CALL, r" \3", answer)
    of_named += grpc_rules.begin_rules(edits.FIRST_BYTES, r" \3")
    of_only = _rules(max_requests, grpc_rules.IS_CALL, "", answer)
    of_only += grpc_rules.begin_rules(edits.FIRST_BYTES)
    only_backend = r"^ *default_backend \{\{ grpc_backends\[0\]\.name or 'unknown' \}\}$"
    return Edit(
        "the refusals and the time limit of gRPC calls, for each backend",
        (edits.USE_BACKEND, only_backend),
        _before(r"use_backend (grpc-[^ ]+) if ([^ ]+)", of_named)
        + "\n"
        + _before(r"default_backend (grpc-[^ ]+)", of_only),
        patterns=(
            rf"^ *http-request return status 200 .*grpc-message .*txn\.limit.* {MARK}$",
            rf"^ *{edits.FIRST_BYTES} if \{{ path_beg .* {MARK}$",
            rf"^ *http-request set-header x-grpc-message-prefix .* {MARK}$",
        ),
        per="^ *(use_backend grpc-[^ ]+ if |default_backend grpc-)",
    )


def _rules(
    max_requests: int, is_ours: str, is_route: str, answer: str, first_answer: str = ""
) -> list[str]:
    r"""Return the rules for requests of one backend, ``\2``; ``answer`` refuses one.

    ``first_answer``, which has a condition of its own, goes before it.
    """
    ours = f"if {is_ours}{is_route}"
    beyond = r"{ nbsrv(\2) gt 0 } { be_conn(\2),div(txn.gateways),sub(txn.limit) ge 0 }"
    is_full, is_refused = "{ var(txn.full) -m bool }", "{ var(txn.refused) -m bool }"
    has_told = f"{ours} {{ var({NUM_REFUSED},0) -m int gt 0 }}"
    return [
        rf"http-request set-var(txn.gateways) nbsrv(\2) {ours}",
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


def _before(line: str, rules: Sequence[str]) -> str:
    """Return the script that puts rules before each line of this form."""
    added = "".join(rf"\1{rule} {MARK}\n" for rule in rules)
    return rf"s@^( *){line}$@{added}&@"
