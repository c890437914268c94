"""Serves the web page and the interface's description, with all assets from this machine."""

import base64
import hashlib
import re
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import swagger_ui_bundle
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles

PAGE_DIR = Path(__file__).parent / "page"
INLINE_SCRIPT = re.compile("<script>(.*?)</script>", re.DOTALL)


class FreshFiles(StaticFiles):
    """Static files that are asked for again: no old script meets a new page after an upgrade."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "no-cache"
        return response


def _headers(scripts: str = "'self'") -> dict[str, str]:
    """Return what keeps a page from asking for anything elsewhere; ``scripts`` may run."""
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; img-src 'self' blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


@lru_cache(maxsize=4)
def _index(root: str) -> bytes:
    """Return the page of a service whose routes are below ``root``, Serve's route_prefix or ""."""
    text = (PAGE_DIR / "index.html").read_text("utf-8")
    return text.replace('="/', f'="{escape(root)}/').encode()


def _swagger(root: str) -> HTMLResponse:
    """Return Swagger UI's page with our own files; its one inline script is allowed by its hash."""
    page = get_swagger_ui_html(
        openapi_url=f"{root}/openapi.json",
        title="Tandem: HTTP interface",
        swagger_js_url=f"{root}/docs/assets/swagger-ui-bundle.js",
        swagger_css_url=f"{root}/docs/assets/swagger-ui.css",
        swagger_favicon_url=f"{root}/page/favicon.svg",
        swagger_ui_parameters={"validatorUrl": None},  # else validator.swagger.io, in some layouts
    )
    scripts = INLINE_SCRIPT.findall(bytes(page.body).decode())
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    page.headers.update(_headers(" ".join(["'self'", *(f"'sha256-{d}'" for d in digests)])))
    return page


def _root(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")


def add_pages(api: FastAPI) -> None:
    """Add ``/``, ``/docs`` and their files; none of them asks for anything elsewhere."""
    headers = _headers()

    @api.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> HTMLResponse:
        answer = HTMLResponse(_index(_root(request)), headers=headers)
        if request.method == "HEAD":
            answer.body = b""
        return answer

    @api.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return _swagger(_root(request))

    api.mount("/page", FreshFiles(directory=PAGE_DIR))
    api.mount("/docs/assets", StaticFiles(directory=swagger_ui_bundle.swagger_ui_path))
