"""Cross-origin requests of browsers (CORS): pages of allowed sites can call and read answers.

Starlette's middleware implements it. HAProxy adds the same headers to its own answers
(app/launch/haproxy_cfg).
"""

from starlette.datastructures import Headers as RequestHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from app.errors import MAX_SHOWN, OriginError
from app.http.errors import response_of
from app.setting_values import EXPOSED

METHODS = ("GET", "HEAD", "POST")


class AllowedOrigins(CORSMiddleware):
    """Answers preflight requests, which have no key, and adds headers to all other answers."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(app, origins, METHODS, allow_headers=("*",), expose_headers=EXPOSED)

    def preflight_response(self, request_headers: RequestHeaders) -> Response:
        """Return Starlette's answer; refusals get the service's error form."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        origin, method = (
            request_headers.get(name, "")[:MAX_SHOWN]
            for name in ("origin", "access-control-request-method")
        )
        text = (
            f"a page of {origin!r} may not send {method}: the service's allowed_origins name the "
            f"pages that may, and they may send {', '.join(METHODS)}"
        )
        scope = {"path": "", "headers": request_headers.raw}  # all that Starlette passes on
        refusal = response_of(scope, OriginError(text))
        del answer.headers["content-length"], answer.headers["content-type"]
        refusal.headers.update(answer.headers)
        return refusal
