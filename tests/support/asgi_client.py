"""A client of an application in this process, and a file of API keys for it."""

from pathlib import Path
from typing import Any

import httpx

KEY = "k" * 32


def asgi_client(api: Any, **transport: Any) -> httpx.AsyncClient:
    """Return a client of an ASGI application; an error that it raises is the caller's."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(api, **transport),
        base_url="http://localhost",
        headers={"accept": "text/html,*/*"},  # as a browser has it
    )


def write_keys(folder: Path, text: str = KEY) -> Path:
    """Write a file of keys that only its owner may read."""
    path = folder / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path
