"""Authentication by bearer keys (RFC 6750), before the body is read."""

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import UnauthorizedError
from app.graph.keys import Keys
from app.http.errors import ERRORS, described, is_protocol, response_of
from app.oip.documents import ProtocolError
from app.responses import ErrorAnswer

# All other routes need a key, so new routes do too. Load balancers probe without a key. The page
# must load before it can ask for a key, and its contents are public.
PROBES = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
OPEN_PATHS = PROBES | {"/", "/docs", "/openapi.json"}
OPEN_BELOW = ("/page/", "/docs/assets/")
SCHEME = {"type": "http", "scheme": "bearer", "description": "one of the service's keys"}


class KeyedRequests:
    """ASGI middleware that answers 401 before the body is read."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        try:
            check_keys(self._keys, scope)
        except UnauthorizedError as error:
            answer = response_of(scope, error)
            problem = ', error="invalid_token"' if error.is_given else ""
            answer.headers["www-authenticate"] = f'Bearer realm="tandem"{problem}'
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN_PATHS or path.startswith(OPEN_BELOW)


def check_keys(keys: Keys, scope: Scope) -> None:
    """Remove a request's key; raise :class:`UnauthorizedError` if it is none of ``keys``."""
    headers = scope["headers"]
    sent = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
    # So that no later code can log it.
    scope["headers"] = [(name, value) for name, value in headers if name != b"authorization"]
    keys.check(sent)


def with_security(description: dict[str, Any]) -> dict[str, Any]:
    """Add the key to the operations of the OpenAPI description that need it."""
    description["components"].setdefault("securitySchemes", {})["key"] = SCHEME
    for path, operations in description["paths"].items():
        if path not in OPEN_PATHS:
            for operation in operations.values():
                operation["security"] = [{"key": []}]
                operation["responses"].setdefault("401", _refused(path))
    return description


def _refused(path: str) -> dict[str, Any]:
    form = ProtocolError if is_protocol({"path": path}) else ErrorAnswer
    return described(form, ERRORS[401]["description"])
