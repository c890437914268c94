"""The page in a real Chromium against the real service.

Every test ends by asking whether the page stayed clean: no script error, no violation of the
content security policy, no request to another host. States that a healthy service cannot be brought
into (a member lost, a thousand classes, not ready yet) are answered inside the browser, in place of
the service.
"""

import base64
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

pytestmark = pytest.mark.browser
expect.set_options(timeout=15_000)  # a busy machine of two cores

CHROMIUM_ARGS = [
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
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


@pytest.fixture(scope="module")
def browser(service_url: str) -> Iterator[Browser]:
    # Of module scope, and started after the service: while playwright's event loop lives in this
    # thread, no asynchronous test could start one of its own.
    path = os.environ.get("TANDEM_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.fail(
            "no chromium: apt-get install chromium, set TANDEM_CHROMIUM, or run -m 'not browser'"
        )
    # Chromium's sandbox refuses to start for root, which is what containers usually run tests as.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGS + sandbox)
        yield browser
        browser.close()


@contextmanager
def watched(
    browser: Browser, url: str, expected_failures: tuple[str, ...], **options
) -> Iterator[Page]:
    """Yields a fresh page that must see no trouble but the error responses that a test provokes."""
    troubles: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        # Chromium itself reports every response of 400 and above here; no page can prevent that.
        is_response = message.text.startswith("Failed to load resource")
        is_expected = is_response and any(
            path in message.location["url"] for path in expected_failures
        )
        if message.type in {"error", "warning"} and not is_expected:
            troubles.append(f"console: {message.text} ({message.location['url']})")

    def on_request(url_requested: str) -> None:
        if not url_requested.startswith((f"{url}/", f"blob:{url}/", "data:")):
            troubles.append(f"request to another host: {url_requested}")

    context = browser.new_context(**options)
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

        def open_page(
            expected_failures: tuple[str, ...] = (),
            prepare: Callable[[Page], object] = lambda page: None,
            **options,
        ) -> Page:
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
    answer = {
        "model_set": "a-set",
        "predictions": predictions,
        "members": {"resnet50": member, "densenet169": member},
        "agreement": True,
        "degraded": False,
        "request_id": "an-id",
        "timings_ms": timings,
    }
    return answer | changes


@pytest.fixture
def photo_file(photo: bytes) -> File:
    return ("photo.jpg", "image/jpeg", photo)


def test_a_dropped_photo_gets_its_label(
    open_page: OpenPage, photo_file: File, photo_label: str
) -> None:
    page = open_page()
    with page.expect_response("**/v1/classify*") as response:
        drop(page, photo_file)
    answer = response.value.json()
    expect(page.locator("#headline")).to_have_text(photo_label)
    expect(page.locator("#preview")).to_be_visible()
    expect(page.locator("#request-id")).to_have_text(answer["request_id"])

    bars = page.locator("#bars li")
    expect(bars.locator(".label")).to_have_text([p["label"] for p in answer["predictions"]])
    expect(page.locator("#share")).to_have_text(bars.locator(".percent").first.inner_text())
    shares = fill_shares(page.locator("#bars"))
    assert shares == pytest.approx([p["probability"] for p in answer["predictions"]], abs=0.02)
    for name, member in answer["members"].items():
        of_member = page.locator(".member").filter(has_text=name)
        expect(of_member.locator("li")).to_have_count(len(bars.all()))
        expect(of_member.locator("li .label").first).to_have_text(member["label"])
    agrees = page.locator("#verdict", has_text="agree").inner_text()
    assert ("disagree" not in agrees) == answer["agreement"]


def test_a_photo_is_chosen_with_the_keyboard(
    open_page: OpenPage, photo_file: File, photo_label: str
) -> None:
    # A listener from the start: playwright switches Chromium's own dialogue off only for listeners,
    # and does not wait for that, so that a key pressed right afterwards may still open it.
    page = open_page(prepare=lambda page: page.on("filechooser", lambda chooser: None))
    for _ in range(5):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "file":
            break
    outline = page.locator("#drop").evaluate("(drop) => getComputedStyle(drop).outlineStyle")
    assert outline == "solid", "the focused drop area shows no outline"
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    name, kind, data = photo_file
    chooser.value.set_files({"name": name, "mimeType": kind, "buffer": data})
    expect(page.locator("#headline")).to_have_text(photo_label)
    expect(page.locator("#filename")).to_have_text(name)


def test_a_copied_photo_is_pasted(open_page: OpenPage, photo: bytes, photo_label: str) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.evaluate(COPY_PICTURE, base64.b64encode(photo).decode())
    page.keyboard.press("Control+v")
    expect(page.locator("#headline")).to_have_text(photo_label)


def test_a_text_file_shows_the_servers_message(open_page: OpenPage, service_url: str) -> None:
    page = open_page(expected_failures=("/v1/classify",))
    drop(page, NOT_AN_IMAGE)
    answer = httpx.post(
        f"{service_url}/v1/classify",
        content=NOT_AN_IMAGE[2],
        headers={"content-type": "text/plain"},
    )
    assert answer.is_client_error
    problem = page.get_by_role("alert")
    expect(problem).to_have_text(answer.json()["error"]["message"])
    expect(problem).to_be_visible()
    expect(page.locator("#details")).to_be_hidden()
    expect(page.locator("#retry")).to_be_hidden()


def test_several_files_become_cards_and_a_bad_one_keeps_to_itself(
    open_page: OpenPage, photo_file: File, photo_label: str
) -> None:
    page = open_page()
    with page.expect_request("**/v1/classify*") as request:
        drop(page, photo_file, NOT_AN_IMAGE, ("again.jpg", *photo_file[1:]))
    assert request.value.headers["content-type"].startswith("multipart/form-data")
    cards = page.locator(".card")
    expect(cards.locator(".name")).to_have_text(["photo.jpg", "notes.txt", "again.jpg"])
    expect(cards.locator(".said .label")).to_have_text([photo_label, photo_label])
    expect(cards.nth(1).locator(".wrong")).not_to_be_empty()
    expect(page.locator("#headline")).to_have_text(photo_label)

    cards.nth(1).press("Enter")
    expect(page.get_by_role("alert")).to_have_text(cards.nth(1).locator(".wrong").inner_text())
    expect(cards.nth(1)).to_be_focused()
    cards.nth(2).click()
    expect(page.locator("#filename")).to_have_text("again.jpg")
    expect(page.locator("#headline")).to_have_text(photo_label)


def test_the_timeline_draws_the_services_own_times(
    open_page: OpenPage, service_url: str, photo_file: File
) -> None:
    members = [m["name"] for m in httpx.get(f"{service_url}/v1/models").json()["members"]]
    page = open_page(reduced_motion="reduce")
    with page.expect_response("**/v1/classify*") as response:
        drop(page, photo_file)
    timings = response.value.json()["timings_ms"]
    of_members = [f"{stage} {name}" for stage in ("queue", "infer") for name in members]
    before = [s["stage"] for s in timings["stages"] if s["stage"] in {"read", "decode"}]
    assert "decode" in before
    expect(page.locator("#stages .stage")).to_have_text([*before, *of_members, "combine"])
    expect(page.locator("#total")).to_have_text(re.compile(rf"^{timings['total']:.0f}(\.\d)? ms$"))

    for stage in timings["stages"]:
        title = " ".join(filter(None, [stage["stage"], stage.get("member")]))
        row = page.locator("#stages li").filter(has=page.get_by_text(title, exact=True))
        lane, span = row.locator(".lane").bounding_box(), row.locator(".span").bounding_box()
        start = (span["x"] - lane["x"]) / lane["width"] * timings["total"]
        duration = span["width"] / lane["width"] * timings["total"]
        few_pixels = 4 / lane["width"] * timings["total"]
        assert start == pytest.approx(stage["start_ms"], abs=few_pixels), title
        assert duration == pytest.approx(stage["duration_ms"], abs=few_pixels), title


def test_the_classes_of_the_served_set_are_named(open_page: OpenPage, service_url: str) -> None:
    served = httpx.get(f"{service_url}/v1/models").json()
    page = open_page()
    expect(page.locator("#classes")).to_contain_text(f"{len(served['labels'])} classes")
    expect(page.locator("#labels li")).to_have_text(served["labels"])
    expect(page.locator("#forced")).to_be_visible()
    if served.get("hint"):
        expect(page.locator("#hint")).to_have_text(served["hint"])
    else:
        expect(page.locator("#hint")).to_be_hidden()


def test_a_thousand_classes_are_counted_and_listed_on_demand(open_page: OpenPage) -> None:
    labels = [f"class {i}" for i in range(1000)]
    models = {"model_set": "imagenet1k", "labels": labels, "members": []}
    page = open_page(prepare=lambda page: fulfil(page, "/v1/models", models))
    expect(page.locator("#classes")).to_contain_text("1000 classes")
    expect(page.locator("#all-labels")).to_be_hidden()
    expect(page.locator("#hint")).to_be_hidden()
    page.locator("summary").click()
    expect(page.locator("#all-labels")).to_be_visible()
    expect(page.locator("#all-labels li")).to_have_count(1000)


def test_disagreement_and_a_lost_member_are_said(open_page: OpenPage, photo_file: File) -> None:
    members = an_answer()["members"]
    members["densenet169"] = members["densenet169"] | {"label": "church"}
    page = open_page()
    fulfil(page, "/v1/classify*", an_answer(members=members, agreement=False))
    drop(page, photo_file)
    expect(page.locator("#verdict")).to_have_text(
        "The members disagree: resnet50 says tench, densenet169 says church."
    )
    expect(page.locator("#degraded")).to_be_hidden()

    page.unroute_all()
    del members["densenet169"]
    fulfil(page, "/v1/classify*", an_answer(members=members, degraded=True))
    drop(page, photo_file)
    expect(page.locator("#degraded")).to_contain_text("without densenet169")


def test_what_the_server_and_files_are_called_is_never_markup(
    open_page: OpenPage, photo_file: File
) -> None:
    hostile = "<img src=x onerror=alert(1)><b>bold</b>"
    page = open_page()
    result = an_answer(hostile, request_id=hostile)
    error = {"error": {"code": "not_an_image", "message": hostile}}
    fulfil(page, "/v1/classify*", {"results": [result, error]})
    drop(page, (hostile, *photo_file[1:]), photo_file)
    expect(page.locator("#headline")).to_have_text(hostile)
    expect(page.locator(".wrong")).to_have_text(hostile)
    expect(page.locator(".card .name").first).to_have_text(hostile)
    assert page.locator("b, [onerror]").count() == 0


def test_a_service_that_is_not_ready_is_waited_for(
    open_page: OpenPage, photo_file: File, photo_label: str
) -> None:
    error = {"error": {"code": "not_ready", "message": "densenet169 is warming up."}}

    def prepare(page: Page) -> None:
        page.clock.install()
        fulfil(page, "/readyz", error, status=503)
        fulfil(page, "/v1/classify*", error, status=503)

    page = open_page(expected_failures=("/readyz", "/v1/classify"), prepare=prepare)
    expect(page.locator("#headline")).to_have_text("Starting up")
    drop(page, photo_file)
    expect(page.locator("#verdict")).to_contain_text(error["error"]["message"])
    expect(page.get_by_role("status")).to_contain_text(error["error"]["message"])
    page.unroute_all()
    page.clock.fast_forward(2000)
    expect(page.locator("#headline")).to_have_text(photo_label)
    expect(page.locator("#labels li").first).to_be_visible()


def test_a_full_service_offers_another_try(
    open_page: OpenPage, photo_file: File, photo_label: str
) -> None:
    page = open_page(expected_failures=("/v1/classify",))
    error = {"error": {"code": "overloaded", "message": "64 requests are waiting."}}
    fulfil(page, "/v1/classify*", error, status=429)
    drop(page, photo_file)
    expect(page.get_by_role("alert")).to_have_text(error["error"]["message"])
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#headline")).to_have_text(photo_label)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_or_jumps_on_a_phone(
    open_page: OpenPage, photo_file: File, photo_label: str, scheme: str
) -> None:
    page = open_page(**PHONE, color_scheme=scheme)
    expect(page.locator("#labels li").first).to_be_visible()
    drop(page, photo_file)
    expect(page.locator("#headline")).to_have_text(photo_label)
    assert page.evaluate("layoutShift") < 0.1  # what web.dev calls a good value
    drop(page, photo_file, NOT_AN_IMAGE, ("a-long-name" * 20, *photo_file[1:]))
    expect(page.locator(".said")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["viewport"]["width"]


def visit_with_an_inline_script(browser: Browser, url: str) -> None:
    with watched(browser, url, ()) as page:
        page.goto(f"{url}/")
        page.evaluate(
            """() => {
              const script = document.createElement("script");
              script.textContent = "window.hasRun = true";
              document.head.append(script);
            }"""
        )
        assert page.evaluate("window.hasRun") is None, "an inline script ran"


def test_the_content_security_policy_is_in_force_and_watched(
    browser: Browser, service_url: str
) -> None:
    policy = httpx.get(f"{service_url}/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    with pytest.raises(AssertionError, match="script-src-elem inline"):
        visit_with_an_inline_script(browser, service_url)
