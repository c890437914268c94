"""Authentication by bearer keys (RFC 6750), before any of the body is read."""

import hashlib
import hmac
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.environment import KEYS_VARIABLE, keys_of_environment
from app.errors import UnauthorizedError
from app.http.errors import ERRORS, error_response
from app.messages import Fault
from app.settings import Settings
from models.api_keys import keys_in, read_key_file, readable_by_others

logger = logging.getLogger("ray.serve")

# Everything else wants a key, so that a new route does too. A load balancer's probes have none; the
# page must be there before it can ask for one; what these tell is in the public repository.
OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/healthz", "/readyz"})
OPEN_BELOW = ("/page/", "/docs/assets/")
ERROR = {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}
REFUSED = {"description": ERRORS[401]["description"], "content": {"application/json": ERROR}}
SCHEME = {"type": "http", "scheme": "bearer", "description": "one of the service's keys"}


class Keys:
    """The keys that are accepted, as hashes; nothing here can tell one."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple({_digest(key.encode("ascii")) for key in keys})

    def __len__(self) -> int:
        return len(self._digests)

    def know(self, key: bytes) -> bool:
        """Tell whether ``key`` is one of them, in the same time whichever it is."""
        digest, is_known = _digest(key), False
        for own in self._digests:
            is_known |= hmac.compare_digest(own, digest)
        return is_known

    def check(self, given: Sequence[str]) -> None:
        """Let a caller in who sent one Authorization header, with a key; anybody, without keys.

        Raises:
            UnauthorizedError: none, more than one, or none of the keys.

        """
        if not self:
            return
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() == "bearer" and self.know(key.strip().encode("utf-8", "replace")):
            return
        raise UnauthorizedError(
            "that is none of this service's keys"
            if given
            else "this service wants a key: send the header Authorization: Bearer KEY"
        )


def _digest(key: bytes) -> bytes:
    # Keys are long and random, so a plain hash is enough: there is nothing to guess.
    return hashlib.sha256(key).digest()


def read_keys(settings: Settings) -> Keys:
    """Return the keys of the settings' file and of TANDEM_API_KEYS; none: everybody may call.

    Raises:
        ApiKeyError: one is too short or no key, the file cannot be read, or a place that is named
            holds none: a service that should have had keys does not start without.

    """
    found: list[str] = []
    if path := settings.api_keys_file:
        found += read_key_file(path)
        if warning := readable_by_others(path):
            logger.warning(warning)
    if (text := keys_of_environment()) is not None:
        found += keys_in(text.replace(",", "\n"), KEYS_VARIABLE)
    return Keys(found)


def require_keys(api: FastAPI, keys: Keys) -> None:
    """Let only callers with one of the ``keys`` in; without any, everybody."""
    if not keys:
        return
    api.add_middleware(KeyedRequests, keys=keys)
    describe = api.openapi

    def openapi() -> dict[str, Any]:
        return _with_security(describe())

    api.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's manual does it


class KeyedRequests:
    """ASGI middleware: answers 401 itself, before the body is read."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("authorization")
        # Nothing further in can log what is not there.
        scope["headers"] = [(k, v) for k, v in scope["headers"] if k != b"authorization"]
        try:
            self._keys.check(given)
        except UnauthorizedError as error:
            await _refusal(Request(scope), error, is_given=bool(given))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN_PATHS or path.startswith(OPEN_BELOW)


def _refusal(request: Request, error: UnauthorizedError, *, is_given: bool) -> ASGIApp:
    answer = error_response(request, Fault.of(error))
    problem = ', error="invalid_token"' if is_given else ""
    answer.headers["www-authenticate"] = f'Bearer realm="tandem"{problem}'
    return answer


def _with_security(description: dict[str, Any]) -> dict[str, Any]:
    """Say in the interface's description which operations want a key."""
    description["components"].setdefault("securitySchemes", {})["key"] = SCHEME
    for path, operations in description["paths"].items():
        if path not in OPEN_PATHS:
            for operation in operations.values():
                operation["security"] = [{"key": []}]
                operation["responses"].setdefault("401", REFUSED)
    return description
