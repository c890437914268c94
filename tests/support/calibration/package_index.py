"""A package index on this machine, as pip takes them: a page for each package, and its wheels."""

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Mapping

import pytest

from tests.support.http_server import QuietRequest, ThreadedServer

DATED = (2026, 1, 1, 0, 0, 0)  # the same bytes every time


def wheel_of(package: str, version: str, files: Mapping[str, bytes]) -> bytes:
    """Return a wheel with these files."""
    stem = f"{package.replace('-', '_')}-{version}"
    info = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        own = {f"{stem}.dist-info/{name}": text.encode() for name, text in info.items()}
        for name, data in {**files, **own}.items():
            archive.writestr(zipfile.ZipInfo(name, DATED), data)
    return content.getvalue()


class _Request(QuietRequest):
    index: "PackageIndex"

    def do_GET(self) -> None:
        *_, package, name = self.path.split("/")
        if name:
            self.index.requests.append(name)
            if name in self.index.stalled:
                self.send_response(200)
                self.send_header("content-length", "1000000")
                self.end_headers()
                self.wfile.write(b"some of it")
                self.index.is_stalling.set()
                self.index.is_over.wait()
                return
            self.send(200, self.index.wheels[name])
        elif links := [n for n in self.index.wheels if n.startswith(package.replace("-", "_"))]:
            page = "".join(f'<a href="{name}">{name}</a>' for name in links)
            self.send(200, f"<!DOCTYPE html><html>{page}</html>".encode(), content_type="text/html")
        else:
            self.send(404, b"")


class PackageIndex(ThreadedServer):
    """Serves ``wheels``, by file name; of ``stalled`` ones only the first bytes come."""

    def __init__(self) -> None:
        self.wheels: dict[str, bytes] = {}
        self.stalled: set[str] = set()
        self.requests: list[str] = []  # of wheels
        self.is_stalling, self.is_over = threading.Event(), threading.Event()
        super().__init__(type("Request", (_Request,), {"index": self}))

    def __exit__(self, *details: object) -> None:
        self.is_over.set()
        super().__exit__(*details)

    def add(self, package: str, version: str, files: Mapping[str, bytes]) -> str:
        """Add a wheel and return its sha256."""
        data = wheel_of(package, version, files)
        self.wheels[f"{package.replace('-', '_')}-{version}-py3-none-any.whl"] = data
        return hashlib.sha256(data).hexdigest()

    @property
    def environment(self) -> dict[str, str]:
        """What makes pip ask this index and nothing else."""
        return {"PIP_INDEX_URL": f"{self.url}/simple", "PIP_CONFIG_FILE": os.devnull}

    def set_for_pip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let pip, started by this process, ask this index and nothing else, once."""
        for name in [n for n in os.environ if n.startswith("PIP_") or n.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        for name, value in {**self.environment, "PIP_RETRIES": "2", "PIP_TIMEOUT": "60"}.items():
            monkeypatch.setenv(name, value)
