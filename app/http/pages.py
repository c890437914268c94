"""Serves the web page and the API description, with all assets from this machine.

They need no key, so they must be cheap: cached bytes, an ETag, and a limit on concurrent answers.
"""

import base64
import hashlib
import json
import mimetypes
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

import swagger_ui_bundle
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from app.errors import OverloadedError
from models.image_files import SUFFIXES
from models.image_formats import KINDS

PAGE_DIR = Path(__file__).parent / "page"
SWAGGER_DIR = Path(swagger_ui_bundle.swagger_ui_path)
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")
INLINE_SCRIPT = re.compile("<script>(.*?)</script>", re.DOTALL)
# Answers being sent: a slow client holds the unsent part of 1.4 MB.
MAX_AT_ONCE = 32
ROUTES_KEPT = 4  # path prefixes for which the description is cached; Serve has one


def _headers(scripts: str) -> dict[str, str]:
    """Return the headers that keep a page from loading anything elsewhere; ``scripts`` may run."""
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; img-src 'self' blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


class Document:
    """Bytes with their response headers."""

    def __init__(self, data: bytes, media_type: str, headers: Mapping[str, str]) -> None:
        self.data, self._media_type = data, media_type
        self.etag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
        # Revalidated each time, so that no old script meets a new page after an upgrade.
        self._headers = {**headers, "cache-control": "no-cache", "etag": self.etag}

    def answer(self, request: Request) -> "BoundedResponse":
        """Return the response, without a body if the client already has these bytes."""
        known = request.headers.get("if-none-match", "")
        if known == "*" or self.etag in (
            tag.strip().removeprefix("W/") for tag in known.split(",")
        ):
            return BoundedResponse(None, 304, self._headers)
        return BoundedResponse(self.data, 200, self._headers, self._media_type)


class BoundedResponse(Response):
    """A response of which a process sends at most :data:`MAX_AT_ONCE` at a time."""

    num_sending = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; raise :class:`OverloadedError` before it if the limit is reached."""
        if BoundedResponse.num_sending >= MAX_AT_ONCE:
            raise OverloadedError(
                f"{MAX_AT_ONCE} pages and their files are being sent, the limit; ask again soon"
            )
        BoundedResponse.num_sending += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            BoundedResponse.num_sending -= 1


@cache
def _page(name: str) -> Document:
    """Return a page; its inline script is allowed by its hash.

    Its addresses are relative, since the path at which browsers see the service is unknown here.
    """
    data = (PAGE_DIR / name).read_bytes()
    if ".heic" in SUFFIXES:  # otherwise phones convert the chosen photos
        data = data.replace(b"image/webp", b"image/webp,image/heic,image/heif,image/avif")
        data = data.replace(b"JPEG, PNG or WebP", KINDS.encode())
    scripts = INLINE_SCRIPT.findall(data.decode())
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    return Document(
        data, "text/html", _headers(" ".join(["'self'", *(f"'sha256-{d}'" for d in digests)]))
    )


@cache  # limited by the number of files
def _file(path: Path) -> Document:
    media_type, _ = mimetypes.guess_type(path.name)
    return Document(path.read_bytes(), media_type or "application/octet-stream", {})


def _root(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")


def add_pages(api: FastAPI) -> None:
    """Add ``/``, ``/docs``, their files and the description; all are served from here."""
    files = {f"/page/{path.name}": path for path in PAGE_DIR.iterdir() if path.is_file()}
    files |= {f"/docs/assets/{name}": SWAGGER_DIR / name for name in SWAGGER_FILES}

    @api.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _page("index.html").answer(request)

    @api.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return _page("docs.html").answer(request)

    @api.get("/page/{name}", include_in_schema=False)
    @api.get("/docs/assets/{name}", include_in_schema=False)
    async def file(request: Request) -> Response:
        path = files.get(request.scope["path"].removeprefix(_root(request)))
        if path is None:
            raise HTTPException(404)
        return _file(path).answer(request)

    @lru_cache(ROUTES_KEPT)
    def description(root: str) -> Document:
        described = api.openapi() | ({"servers": [{"url": root}]} if root else {})
        return Document(json.dumps(described).encode(), "application/json", {})

    @api.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return description(_root(request)).answer(request)
