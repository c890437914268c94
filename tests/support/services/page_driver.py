"""Drives the page in a real Chromium and watches that it stays clean.

Clean is: no script error, no violation of the content security policy, no request to another host.
"""

import base64
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Locator,
    Page,
    Route,
    expect,
    sync_playwright,
)

WITHIN_MS = 60_000  # a busy machine of two cores
expect.set_options(timeout=WITHIN_MS)

CHROMIUM_ARGS = [
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Chromium's sandbox refuses to start for root, which is what containers usually run tests as.
NO_SANDBOX = ["--no-sandbox"] if os.geteuid() == 0 else []
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
}
NOT_AN_IMAGE = ("notes.txt", "text/plain", b"just some text, long enough to be looked at\n" * 20)
WATCH_SCRIPT = """
    window.violations = [];
    addEventListener("securitypolicyviolation", (event) => {
      violations.push(`${event.violatedDirective} ${event.blockedURI}`);
    });
    window.layoutShift = 0;
    new PerformanceObserver((list) => {
      for (const entry of list.getEntries()) layoutShift += entry.value;
    }).observe({ type: "layout-shift", buffered: true });
"""
MAKE_TRANSFER = """(files) => {
    const transfer = new DataTransfer();
    for (const [name, type, base64] of files) {
      const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
      transfer.items.add(new File([bytes], name, { type }));
    }
    return transfer;
}"""
COPY_PICTURE = """async (base64) => {
    const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    const bitmap = await createImageBitmap(new Blob([bytes]));
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
    canvas.getContext("2d").drawImage(bitmap, 0, 0);
    const png = await canvas.convertToBlob({ type: "image/png" });
    await navigator.clipboard.write([new ClipboardItem({ "image/png": png })]);
}"""

OpenPage = Callable[..., Page]
File = tuple[str, str, bytes]


def chromium() -> str:
    """Return the path of the system's Chromium."""
    path = os.environ.get("TANDEM_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.fail(
            "no chromium: apt-get install chromium, set TANDEM_CHROMIUM, or run -m 'not browser'"
        )
    return path


@pytest.fixture(scope="module")
def browser(service_url: str) -> Iterator[Browser]:
    # Of module scope, and started after the service: while playwright's event loop lives in this
    # thread, no asynchronous test could start one of its own.
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium(), args=CHROMIUM_ARGS + NO_SANDBOX
        )
        yield browser
        browser.close()


@contextmanager
def watched(browser, url, expected_failures, **options):
    """Yields a fresh page that must see no trouble but the error responses that a test provokes."""
    troubles: list[str] = []
    origin = "/".join(url.split("/")[:3])  # all that a blob's address has of its page's

    def on_console(message: ConsoleMessage) -> None:
        # Chromium itself reports every response of 400 and above here; no page can prevent that.
        is_response = message.text.startswith("Failed to load resource")
        is_expected = is_response and any(
            path in message.location["url"] for path in expected_failures
        )
        if message.type in {"error", "warning"} and not is_expected:
            troubles.append(f"console: {message.text} ({message.location['url']})")

    def on_request(url_requested: str) -> None:
        if not url_requested.startswith((f"{url}/", f"blob:{origin}/", "data:")):
            troubles.append(f"request to another host: {url_requested}")

    context = browser.new_context(**options)
    context.set_default_timeout(WITHIN_MS)
    page = context.new_page()
    page.add_init_script(WATCH_SCRIPT)
    page.on("console", on_console)
    page.on("pageerror", lambda error: troubles.append(f"uncaught: {error}"))
    page.on("request", lambda request: on_request(request.url))
    yield page
    troubles += page.evaluate("violations")
    context.close()
    assert not troubles, "\n".join(troubles)


@pytest.fixture
def open_page(browser: Browser, service_url: str) -> Iterator[OpenPage]:
    """Opens the page; ``expected_failures`` are paths whose error responses the test provokes."""
    with ExitStack() as stack:

        def open_page(expected_failures=(), prepare=lambda page: None, **options):
            page = stack.enter_context(watched(browser, service_url, expected_failures, **options))
            prepare(page)
            page.goto(f"{service_url}/")
            return page

        yield open_page


def drop(page: Page, *files: File) -> None:
    encoded = [(name, kind, base64.b64encode(data).decode()) for name, kind, data in files]
    transfer = page.evaluate_handle(MAKE_TRANSFER, encoded)
    page.locator("#drop").dispatch_event("dragover", {"dataTransfer": transfer})
    page.locator("#drop").dispatch_event("drop", {"dataTransfer": transfer})


def fulfil(page: Page, path: str, body: dict, status: int = 200) -> None:
    page.route(f"**{path}", lambda route: route.fulfill(status=status, json=body))


def answered(page: Page, body: dict, *files: File, status: int = 200) -> None:
    """Drop files that get this answer in the browser, or ``results`` in the files' order."""
    page.unroute("**/v1/classify*")
    results = iter(body.get("results", ()))

    def answer(route: Route) -> None:
        one = next(results, body)
        route.fulfill(status=400 if one is not body and "error" in one else status, json=one)

    page.route("**/v1/classify*", answer)
    drop(page, *files)


def fill_shares(bars: Locator) -> list[float]:
    """Width of each bar as a share of its track, as laid out."""
    return bars.locator(".fill").evaluate_all(
        "(fills) => fills.map((fill) => fill.offsetWidth / fill.parentElement.clientWidth)"
    )


def an_answer(label: str = "tench", **changes) -> dict:
    predictions = [
        {"index": 0, "label": label, "probability": 0.75},
        {"index": 1, "label": "church", "probability": 0.25},
    ]
    member = {"label": label, "probability": 0.75, "predictions": predictions}
    timings = {"total": 10.0, "stages": [{"stage": "decode", "start_ms": 1.0, "duration_ms": 2.5}]}
    return {
        "model_set": "a-set",
        "predictions": predictions,
        "members": {"resnet50": member, "densenet169": member},
        "agreement": True,
        "degraded": False,
        "request_id": "an-id",
        "timings_ms": timings,
    } | changes


@pytest.fixture
def photo_file(photo: bytes) -> File:
    return ("photo.jpg", "image/jpeg", photo)
