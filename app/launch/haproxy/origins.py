"""The rules by which pages of other origins read HAProxy's own answers, too (CORS).

The Gateway marks its answers itself (:mod:`app.http.origins`); preflights are its as well.
"""

from collections.abc import Sequence

from app.setting_values import EXPOSED

ORIGIN = "txn.tandem_origin"
ALLOW = "access-control-allow-origin"


def of_origins(origins: Sequence[str]) -> list[str]:
    """Return the rules for pages of these ``origins``, ``*`` being all; none without any."""
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
