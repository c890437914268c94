"""HAProxy's own error responses, in the form of the service's errors."""

import json
from collections.abc import Iterable, Sequence

from app.errors import DeadlineError, NotReadyError, RouteError
from app.setting_values import EXPOSED

BEGIN_WITHIN_S = 10  # for the headers and the first bytes of a body
METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS"  # that the Gateway's parser knows, among more
ERROR_RESPONSES = {
    400: ("bad_request", "this is not HTTP/1.1, or address or headers are over 15 KB or 100 lines"),
    405: (RouteError.code, f"the method is none of {METHODS}, in capital letters; see /docs"),
    408: ("slow_request", f"headers and body did not begin to arrive within {BEGIN_WITHIN_S} s"),
    502: ("broken_off", "the service broke off while it answered; try again"),
    503: (NotReadyError.code, "no replica answers yet; try again in 1 s"),
    504: (DeadlineError.code, "the service did not answer in time; try again"),
}
# Statuses that HAProxy may send before it has read a request line. Without a path it cannot choose
# a form, and it writes no text with variables.
WITHOUT_PATH = (400, 408)
# Text before and after an error's code and message. KServe's protocols have the whole error as a
# single text. Each entry has a variable of the request, and the text for the other routes.
AROUND = (
    ("txn.tandem_before", '"', '{"code": "'),
    ("txn.tandem_between", ": ", '", "message": "'),
    ("txn.tandem_after", '"', '", "request_id": ""}'),
)
ORIGIN = "txn.tandem_origin"
ALLOW = "access-control-allow-origin"
IS_PROTOCOL = "{ path_sub /v2/ /v1/models/ }"
PROTOCOL_ERRORS = [
    f"http-request set-var-fmt({name}) '{of_protocol}' if {IS_PROTOCOL}"
    for name, of_protocol, _ in AROUND
]


def answers(statuses: Iterable[int]) -> list[str]:
    """Return the lines that give HAProxy's own responses with these ``statuses`` our error form."""
    return [
        f"http-error status {status} content-type application/json "
        + _error_text(status, *ERROR_RESPONSES[status])
        + (" hdr retry-after 1" if status == 503 else "")
        for status in statuses
    ]


def _error_text(status: int, code: str, message: str) -> str:
    if status in WITHOUT_PATH:
        return f"string '{error_body(code, message)}'"
    before, between, after = (
        f'%[var({name},"{usual.replace(chr(34), chr(92) + chr(34))}")]' for name, _, usual in AROUND
    )
    return f"lf-string '{{\"error\": {before}{code}{between}{message}{after}}}'"


def error_body(code: str, message: str) -> str:
    """Return the service's form of an error."""
    return json.dumps({"error": {"code": code, "message": message, "request_id": ""}})


def protocol_error_body(message: str) -> str:
    """Return the Open Inference Protocol's form of an error."""
    return json.dumps({"error": message})


def of_origins(origins: Sequence[str]) -> list[str]:
    """Return the rules with which pages of these ``origins`` can read HAProxy's responses (CORS).

    ``*`` allows every origin; without origins there are no rules. The Gateway adds these headers to
    its own responses (:mod:`app.http.origins`), and answers preflight requests.
    """
    if not origins:
        return []
    unmarked = f"if {{ var({ORIGIN}) -m found }} !{{ res.hdr({ALLOW}) -m found }}"
    headers = {
        "access-control-expose-headers": ", ".join(EXPOSED),
        "vary": "Origin",
        ALLOW: f"%[var({ORIGIN})]",  # last: the rules only apply while it is missing
    }
    return [
        *(
            f"http-request set-var({ORIGIN}) str({origin}) if {{ req.hdr(origin) -m "
            + ("found }" if origin == "*" else f"str {origin} }}")
            for origin in origins
        ),
        *(
            f'http-after-response set-header {name} "{value}" {unmarked}'
            for name, value in headers.items()
        ),
    ]
