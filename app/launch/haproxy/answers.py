"""What HAProxy answers itself, in the service's own form of errors."""

import json
from collections.abc import Iterable, Sequence

from app.setting_values import EXPOSED

BEGIN_WITHIN_S = 10  # headers, and the beginning of a body
METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS"  # those of which the Gateway's parser knows more
ERROR_RESPONSES = {
    400: ("bad_request", "this is not HTTP/1.1, or address or headers are over 15 KB or 100 lines"),
    405: ("http", f"the method is none of {METHODS}, in capital letters; see /docs"),
    408: ("slow_request", f"headers and body did not begin to arrive within {BEGIN_WITHIN_S} s"),
    502: ("broken_off", "the service broke off while it answered; try again"),
    503: ("not_ready", "no replica answers yet; try again in 1 s"),
    504: ("deadline", "the service did not answer in time; try again"),
}
# They may be answered before a request line is read. Then there is no path, and HAProxy writes no
# text with variables in it.
WITHOUT_PATH = (400, 408)
# What is around an answer's code and message: in the form of KServe's protocols the whole error is
# one text. Each has a variable of the request, and what it is for the other routes.
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
    """Return the lines by which HAProxy's own answers with these ``statuses`` have our form."""
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
    """Return the rules by which pages of these ``origins`` read HAProxy's own answers, too (CORS).

    ``*`` are all; without any there are no rules. The Gateway marks its answers itself
    (:mod:`app.http.origins`); preflights are its as well.
    """
    if not origins:
        return []
    unmarked = f"if {{ var({ORIGIN}) -m found }} !{{ res.hdr({ALLOW}) -m found }}"
    headers = {
        "access-control-expose-headers": ", ".join(EXPOSED),
        "vary": "Origin",
        ALLOW: f"%[var({ORIGIN})]",  # the last: with it the answer is marked
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
