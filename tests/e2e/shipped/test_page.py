"""The page in a real Chromium against the real service; every page is watched (page_driver)."""

import base64
import io
import math
import re

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, expect

from models.image import ImageRule, read_image
from tests.support.services.page_driver import (
    CHROMIUM_ARGS,
    COPY_PICTURE,
    NO_SANDBOX,
    NOT_AN_IMAGE,
    PHONE,
    chromium,
    drop,
    fill_shares,
    watched,
)

pytestmark = pytest.mark.browser
RULE = ImageRule(128, 146)


def test_a_dropped_photo_gets_its_label(open_page, photo_file, photo_label):
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


def test_a_photo_is_chosen_with_the_keyboard(open_page, photo_file, photo_label):
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


def test_a_copied_photo_is_pasted(open_page, photo, photo_label):
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.evaluate(COPY_PICTURE, base64.b64encode(photo).decode())
    page.keyboard.press("Control+v")
    expect(page.locator("#headline")).to_have_text(photo_label)


def test_a_text_file_shows_the_servers_message(open_page, service_url):
    page = open_page(expected_failures=("/v1/classify",))
    drop(page, NOT_AN_IMAGE)
    answer = httpx.post(
        f"{service_url}/v1/classify",
        content=NOT_AN_IMAGE[2],
        headers={"content-type": "text/plain"},
        timeout=60,
    )
    assert answer.is_client_error
    problem = page.get_by_role("alert")
    expect(problem).to_have_text(answer.json()["error"]["message"])
    expect(problem).to_be_visible()
    expect(page.locator("#details")).to_be_hidden()
    expect(page.locator("#retry")).to_be_hidden()


def test_several_files_become_cards_and_a_bad_one_keeps_to_itself(
    open_page, photo_file, photo_label
):
    page, asked = open_page(expected_failures=("/v1/classify",)), []
    page.on("request", lambda request: asked.append(request.headers.get("content-type")))
    drop(page, photo_file, NOT_AN_IMAGE, ("again.jpg", *photo_file[1:]))
    cards = page.locator(".card")
    expect(cards.locator(".name")).to_have_text(["photo.jpg", "notes.txt", "again.jpg"])
    expect(cards.locator(".said .label")).to_have_text([photo_label, photo_label])
    expect(cards.nth(1).locator(".wrong")).not_to_be_empty()
    expect(page.locator("#headline")).to_have_text(photo_label)
    assert sorted(filter(None, asked)) == ["image/jpeg", "image/jpeg", "text/plain"]

    cards.nth(1).press("Enter")
    expect(page.get_by_role("alert")).to_have_text(cards.nth(1).locator(".wrong").inner_text())
    expect(cards.nth(1)).to_be_focused()
    cards.nth(2).click()
    expect(page.locator("#filename")).to_have_text("again.jpg")
    expect(page.locator("#headline")).to_have_text(photo_label)


KEEP_BODIES = """
    window.bodies = [];
    const send = XMLHttpRequest.prototype.send;
    XMLHttpRequest.prototype.send = function (body) {
      bodies.push(body);
      return send.call(this, body);
    };
"""
READ_BODIES = """async () => {
    const read = async (blob) => Array.from(new Uint8Array(await blob.arrayBuffer()));
    return Promise.all(bodies.map(read));
}"""


def phone_photo(photo: bytes, orientation: int) -> bytes:
    """Return the photo in 12 megapixels with grain, stored in a phone's orientation."""
    upright = Image.open(io.BytesIO(photo)).resize((4000, 3000), Image.Resampling.BICUBIC)
    grain = np.random.default_rng(7).integers(-12, 13, (3000, 4000, 1), np.int16)
    pixels = np.clip(np.asarray(upright.convert("RGB")) + grain, 0, 255).astype(np.uint8)
    stored = Image.fromarray(np.rot90(pixels) if orientation == 6 else pixels)
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    stored.save(file, "JPEG", quality=90, exif=exif)
    return file.getvalue()


def test_a_large_photo_is_shrunk_before_it_is_sent(open_page, service_url, photo, photo_label):
    side = 2 * httpx.get(f"{service_url}/v1/models", timeout=60).json()["resize_shorter"]
    page = open_page(prepare=lambda page: page.add_init_script(KEEP_BODIES))
    for orientation in (1, 6):
        large = phone_photo(photo, orientation)
        with page.expect_request("**/v1/classify*") as request:
            drop(page, ("large.jpg", "image/jpeg", large))
        assert request.value.headers["x-tandem-shrunk"] == "4000x3000"
        expect(page.locator("#headline")).to_have_text(photo_label)
        (sent,) = map(bytes, page.evaluate(READ_BODIES))
        page.evaluate("bodies.length = 0")
        picture = Image.open(io.BytesIO(sent))
        assert (picture.format, picture.size) == ("JPEG", (round(side * 4 / 3), side))
        assert len(sent) * 8 < len(large)
        words = f"sent as {side} px, {math.ceil(len(sent) / 1e3)} KB of {len(large) / 1e6:.1f} MB"
        expect(page.locator("#sent")).to_have_text(words)
        as_seen = read_image(large, RULE).astype(int), read_image(sent, RULE).astype(int)
        assert np.abs(as_seen[0] - as_seen[1]).mean() < 3  # of 255: upright, in its colours


def test_only_large_pictures_are_shrunk_and_others_sent_as_they_are(open_page, photo):
    failures = ("/v1/classify",)
    page = open_page(failures, lambda page: page.add_init_script(KEEP_BODIES))
    large, file, shrunk_from = phone_photo(photo, 1), io.BytesIO(), []
    Image.open(io.BytesIO(photo)).resize((256, 192)).save(file, "JPEG")
    page.on("request", lambda request: shrunk_from.append(request.headers.get("x-tandem-shrunk")))
    photos = (("small.jpg", file.getvalue()), ("large.jpg", large))
    drop(page, *((name, "image/jpeg", data) for name, data in photos), NOT_AN_IMAGE)
    expect(page.locator(".card .said")).to_have_count(2)
    expect(page.locator(".card .wrong")).to_have_count(1)
    assert list(filter(None, shrunk_from)) == ["4000x3000"]
    expect(page.locator("#sent")).to_be_hidden()
    page.locator(".card").nth(1).click()
    expect(page.locator("#sent")).to_be_visible()
    sent = sorted(map(bytes, page.evaluate(READ_BODIES)), key=len)
    assert {file.getvalue(), NOT_AN_IMAGE[2]} < set(sent)
    assert len(sent) == 3
    assert len(sent[-1]) < len(large) / 8


def test_an_avif_is_sent_as_jpeg_so_that_no_service_needs_to_read_it(open_page, photo, photo_label):
    page, file = open_page(prepare=lambda page: page.add_init_script(KEEP_BODIES)), io.BytesIO()
    small = Image.open(io.BytesIO(photo)).resize((256, 192))
    small.save(file, "AVIF")
    drop(page, ("phone.avif", "image/avif", file.getvalue()))
    expect(page.locator("#headline")).to_have_text(photo_label)
    (sent,) = map(bytes, page.evaluate(READ_BODIES))
    picture = Image.open(io.BytesIO(sent))
    assert (picture.format, picture.size) == ("JPEG", small.size)
    as_seen = np.asarray(small, int), np.asarray(picture.convert("RGB"), int)
    assert np.abs(as_seen[0] - as_seen[1]).mean() < 5  # of 255: its colours


@pytest.mark.slow  # waits for 8 s
def test_a_picture_too_large_for_a_slow_line_is_sent_once_more_smaller(
    open_page, photo, photo_label
):
    page = open_page(("/v1/classify",), lambda page: page.add_init_script(KEEP_BODIES))
    page.context.new_cdp_session(page).send(
        "Network.emulateNetworkConditions",
        {"offline": False, "latency": 50, "downloadThroughput": -1, "uploadThroughput": 1_000},
    )
    drop(page, ("large.jpg", "image/jpeg", phone_photo(photo, 6)))
    expect(page.locator("#headline")).to_have_text(re.compile(r"Sending, \d+%"))
    expect(page.locator("#verdict")).to_have_text("The line is slow: a smaller picture is sent.")
    expect(page.locator("#headline")).to_have_text(photo_label)
    expect(page.locator("#retry")).to_be_hidden()
    first, second = (
        Image.open(io.BytesIO(sent)) for sent in map(bytes, page.evaluate(READ_BODIES))
    )
    assert min(second.size) * 2 == min(first.size)


def test_a_visitor_reads_no_operators_commands(browser, service_url):
    named = service_url.replace("127.0.0.1", "tandem.test")
    mapped = {
        "args": [*CHROMIUM_ARGS, *NO_SANDBOX, "--host-resolver-rules=MAP tandem.test 127.0.0.1"]
    }
    visitor = browser.browser_type.launch(executable_path=chromium(), **mapped)
    for who, url, shows in ((browser, service_url, True), (visitor, named, False)):
        with watched(who, url, ()) as page:
            page.goto(f"{url}/")
            expect(page.locator("#labels li").first).to_be_visible()
            assert ("tandem " in page.locator("body").inner_text()) == shows
    visitor.close()


def test_the_timeline_draws_the_services_own_times(open_page, service_url, photo_file):
    served = httpx.get(f"{service_url}/v1/models", timeout=60).json()
    members = [member["name"] for member in served["members"]]
    page = open_page(reduced_motion="reduce")
    page.evaluate("document.getElementById('stages-shown').open = true")
    with page.expect_response("**/v1/classify*") as response:
        drop(page, photo_file)
    timings = response.value.json()["timings_ms"]
    of_members = [f"{stage} {name}" for stage in ("queue", "infer") for name in members]
    before = [s["stage"] for s in timings["stages"] if s["stage"] in {"read", "decode"}]
    assert "decode" in before
    expect(page.locator("#stages .stage")).to_have_text([*before, *of_members, "combine"])
    expect(page.locator("#total")).to_have_text(re.compile(r"^\d+(\.\d)? ms$"))
    total = float(page.locator("#total").inner_text().removesuffix(" ms"))
    assert total == pytest.approx(timings["total"], abs=0.05 if total < 100 else 0.5)

    for stage in timings["stages"]:
        title = " ".join(filter(None, [stage["stage"], stage.get("member")]))
        row = page.locator("#stages li").filter(has=page.get_by_text(title, exact=True))
        lane, span = row.locator(".lane").bounding_box(), row.locator(".span").bounding_box()
        assert lane
        assert span
        start = (span["x"] - lane["x"]) / lane["width"] * timings["total"]
        duration = span["width"] / lane["width"] * timings["total"]
        few_pixels = 4 / lane["width"] * timings["total"]
        assert start == pytest.approx(stage["start_ms"], abs=few_pixels), title
        assert duration == pytest.approx(stage["duration_ms"], abs=few_pixels), title


def test_the_classes_of_the_served_set_are_named(open_page, service_url):
    served = httpx.get(f"{service_url}/v1/models", timeout=60).json()
    page = open_page()
    expect(page.locator("#classes")).to_contain_text(f"{len(served['labels'])} classes")
    expect(page.locator("#labels li")).to_have_text(served["labels"])
    expect(page.locator("#forced")).to_be_visible()
    score = served["accuracy"][-1]["scores"]["INT8"]["ensemble"]
    expect(page.locator("#accuracy")).to_contain_text(f"{score['top1'] * 100:.1f}%")
    expect(page.locator("#accuracy")).to_contain_text(f"{served['accuracy'][-1]['num_images']}")
    if served.get("hint"):
        expect(page.locator("#hint")).to_have_text(served["hint"])
    else:
        expect(page.locator("#hint")).to_be_hidden()


@pytest.mark.parametrize("name", ["golf ball", "parachute"])
def test_an_example_picture_is_classified(open_page, name):
    page = open_page()
    page.get_by_role("button", name=name).click()
    expect(page.locator("#headline")).to_contain_text(name)
    expect(page.locator("#examples")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_or_jumps_on_a_phone(open_page, photo_file, photo_label, scheme):
    page = open_page(("/v1/classify",), **PHONE, color_scheme=scheme)
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


def test_the_content_security_policy_is_in_force_and_watched(browser, service_url):
    answer = httpx.get(f"{service_url}/", timeout=60, headers={"accept": "text/html"})
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    with pytest.raises(AssertionError, match="script-src-elem inline"):
        visit_with_an_inline_script(browser, service_url)


def test_the_description_of_the_interface_works_without_the_internet(browser, service_url):
    with watched(browser, service_url, ()) as page:
        page.goto(f"{service_url}/docs")
        expect(page.get_by_text("/v1/classify").first).to_be_visible()
        page.get_by_role("button", name="/v1/models").first.click()
        page.get_by_role("button", name="Try it out").click()
        with page.expect_response("**/v1/models") as response:
            page.get_by_role("button", name="Execute").click()
        assert response.value.ok
