"""The page in states that a healthy service cannot be brought into, answered in the browser.

A member lost, a thousand classes, not ready yet, full: :func:`fulfil` answers in place of the
service. What it does not answer comes from the HTTP interface, without networks. The page of a
whole service: shipped/test_page.py.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from app.settings import Settings
from tests.support.fakes import FakeService
from tests.support.gateway_behind_haproxy import gateway_of
from tests.support.services.page_driver import an_answer, answered, drop, fulfil

pytestmark = pytest.mark.browser


class AnyPicture(FakeService):
    """Gives every picture the same label; knows ten, and has the members of `an_answer`."""

    def _one(self, data, request_id):
        return super()._one(b"image", request_id)

    def served_models(self):
        models = super().served_models()
        (member,) = models.members
        members = [replace(member, name=name) for name in an_answer()["members"]]
        return replace(models, members=members, labels=[f"class {i}" for i in range(10)])


@pytest.fixture(scope="module")
def service_url():
    with gateway_of(AnyPicture(Settings())) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def photo_label() -> str:
    return "image"


def test_a_thousand_classes_are_counted_and_listed_on_demand(open_page):
    labels = [f"class {i}" for i in range(1000)]
    models: dict[str, Any] = {"model_set": "imagenet1k", "labels": labels, "members": []}
    page = open_page(prepare=lambda page: fulfil(page, "/v1/models", models))
    expect(page.locator("#classes")).to_contain_text("1000 classes")
    expect(page.locator("#all-labels")).to_be_hidden()
    expect(page.locator("#hint")).to_be_hidden()
    expect(page.locator("#accuracy")).to_have_text("Its accuracy was not measured.")
    judged = {"num_images": 500, "full_top1": 0.864}
    models |= {"verified": "unmeasured", "fast_plan": {"dataset": "photos/val", "judged": judged}}
    page = open_page(prepare=lambda page: fulfil(page, "/v1/models", models))
    expect(page.locator("#accuracy")).to_have_text(
        "Right in 86.4% of 500 photographs of photos/val."
    )
    page.locator("#more summary").click()
    expect(page.locator("#all-labels")).to_be_visible()
    expect(page.locator("#all-labels li")).to_have_count(1000)


def test_a_service_that_is_taught_takes_pictures_and_a_full_one_says_so(open_page, photo_file):
    labels = ["tench", "church"]
    models: dict[str, Any] = {"model_set": "a-set", "labels": labels, "members": [], "teach": True}
    kept = {"photographs": 1, "labels": {"tench": 1}}

    def prepare(page):
        fulfil(page, "/v1/models", models)
        fulfil(page, "/v1/teach", kept)
        error = {"error": {"message": "2 photographs are kept, of at most 2"}}
        fulfil(page, "/v1/teach?label=none", error, 409)

    page = open_page(("/v1/teach",), prepare=prepare)
    expect(page.locator(".tile")).to_contain_text(
        ["tench1 photograph", "churchdrop or choose", "none of these"]
    )
    answered(page, an_answer(), photo_file)
    expect(page.locator("#right")).to_have_value("church")
    page.locator("#right").select_option("none")
    page.locator("#correct button").click()
    expect(page.locator("#corrected")).to_have_text(
        "Not kept. 2 photographs are kept, of at most 2"
    )
    page = open_page()
    expect(page.locator("#labels li").first).to_be_visible()
    expect(page.locator("#teach")).to_be_hidden()


def test_disagreement_and_a_lost_member_are_said(open_page, photo_file):
    members = an_answer()["members"]
    members["densenet169"] = members["densenet169"] | {"label": "church"}
    page = open_page()
    answered(page, an_answer(members=members, agreement=False), photo_file)
    expect(page.locator("#verdict")).to_have_text(
        "The members disagree: resnet50 says tench, densenet169 says church."
    )
    expect(page.locator("#degraded")).to_be_hidden()

    page.unroute_all()
    del members["densenet169"]
    answered(page, an_answer(members=members, degraded=True), photo_file)
    expect(page.locator("#degraded")).to_contain_text("without densenet169")


def test_an_answer_that_is_not_sure_says_so_by_word_and_colour(open_page, photo_file):
    page, colors = open_page(), []
    for sure, headline in ((False, "Not sure, one of ten: tench"), (True, "One of ten: tench")):
        answered(page, an_answer(sure=sure), photo_file)
        expect(page.locator(".headline")).to_have_text(f"{headline} 75.0%")
        expect(page.get_by_role("status")).to_contain_text(f"{headline}, 75.0%")
        of_bar = "getComputedStyle(document.querySelector('#bars .fill')).backgroundColor"
        of_text = "getComputedStyle(document.querySelector('#headline')).color"
        colors += [page.evaluate(of_bar), page.evaluate(of_text)]
    of_doubt, of_ink = set(colors[:2]), set(colors[2:])  # of the bars and the text alike
    assert len(of_doubt) == len(of_ink) == 1
    assert of_doubt != of_ink


def test_an_answer_that_is_not_sure_offers_the_other_sets_or_says_how_to_get_one(
    open_page, photo_file
):
    sets = {"labels": ["tench", "church"], "members": [], "hint": "fetch imagenet"}
    first = sets | {"model_set": "first", "model_sets": ["first", "thousand"]}
    page = open_page(prepare=lambda page: fulfil(page, "/v1/models*", first))
    expect(page.locator("#forced")).to_contain_text("one of the set's two classes, whatever")
    answered(page, an_answer(sure=True), photo_file)
    expect(page.locator("#others button")).to_have_count(0)
    expect(page.locator("#elsewhere")).to_be_hidden()
    answered(page, an_answer(sure=False), photo_file)
    offer = page.get_by_role("button", name="Ask thousand")
    expect(offer).to_be_visible()
    expect(page.locator("#others button")).to_have_count(1)
    page.unroute_all()
    labels = [f"class {number}" for number in range(1000)]
    fulfil(page, "/v1/models*", first | {"model_set": "thousand", "labels": labels})
    fulfil(page, "/v1/classify*", an_answer(sure=False))
    with page.expect_request("**/v1/classify*model_set=thousand*"):
        offer.click()
    expect(page.locator(".headline")).to_contain_text("Not sure, perhaps: tench")
    expect(page.locator("#forced")).to_contain_text("1,000 classes")
    expect(page.get_by_role("button", name="Ask first")).to_be_visible()

    page.unroute_all()
    alone = open_page(
        prepare=lambda page: fulfil(page, "/v1/models*", sets | {"model_set": "first"})
    )
    answered(alone, an_answer(sure=False), photo_file)
    expect(alone.locator("#elsewhere")).to_have_text("fetch imagenet")


def test_the_page_says_on_what_sure_was_measured(open_page):
    foreign = {"dataset": "b", "num_images": 500, "share": 0.036, "interval": [0.02, 0.05]}
    sure: dict[str, object] = {"share": 0.4, "num_images": 750, "right": 0.97}
    sure |= {"measured_on": "pets/val", "wrong_weight": 2.0, "foreign": foreign}
    models = {"model_set": "a", "labels": ["tench", "church"], "members": [], "sure": sure}
    page = open_page(prepare=lambda page: fulfil(page, "/v1/models", models))
    expect(page.locator("#sure")).to_have_text(
        "Sure: 40.0% of the answers to 750 images (pets/val), 97.0% of them right, each wrong "
        "answer counted 2 times. Of 500 images of other classes 3.6% are sure too."
    )


def test_a_member_that_answered_alone_is_named(open_page, photo_file):
    members = an_answer()["members"]
    del members["densenet169"]
    alone = an_answer(members=members, skipped_members=["densenet169"])
    page = open_page()
    answered(page, alone, photo_file)
    says = "The answer of resnet50 was likely enough; densenet169 was not asked."
    expect(page.locator("#verdict")).to_have_text(says)
    expect(page.get_by_role("status")).to_contain_text(says)
    expect(page.locator("#degraded")).to_be_hidden()
    expect(page.locator("#members h3")).to_have_count(1)

    answered(page, {"results": [alone, an_answer()]}, photo_file, photo_file)
    expect(page.locator(".card .aside")).to_have_text([says, "Both members agree."])


def test_labels_of_a_multi_label_set_which_may_be_none(open_page, photo_file):
    several, none = an_answer(threshold=0.5), an_answer(threshold=0.5, predictions=[])
    none["members"] = {name: {"predictions": []} for name in several["members"]}
    page = open_page()
    answered(page, several, photo_file)
    expect(page.locator("#headline")).to_have_text("tench, church")
    expect(page.locator("#share")).to_have_text("")
    expect(page.locator("#bars .percent")).to_have_text(["75.0%", "25.0%"])

    answered(page, none, photo_file)
    expect(page.locator("#headline")).to_have_text("No label")
    expect(page.locator("#verdict")).to_have_text("Both members agree.")
    expect(page.locator("#bars li")).to_have_count(0)

    page.unroute_all()
    apart = none | {"agreement": False}
    apart["members"] = none["members"] | {"resnet50": several["members"]["resnet50"]}
    answered(page, {"results": [apart, several]}, photo_file, photo_file)
    says = "The members disagree: resnet50 says tench, church, densenet169 says No label."
    expect(page.locator("#verdict")).to_have_text(says)
    expect(page.locator(".card .said .label")).to_have_text(["No label", "tench, church"])


def test_answers_of_the_set_before_are_gone_while_another_is_asked(open_page, photo_file):
    sets = {"model_sets": ["first", "second"], "labels": ["tench", "church"], "members": []}
    page = open_page(
        prepare=lambda page: fulfil(page, "/v1/models*", sets | {"model_set": "first"})
    )
    answered(page, {"results": [an_answer(), an_answer()]}, photo_file, photo_file)
    expect(page.locator(".card .said")).to_have_count(2)

    page.unroute_all()
    fulfil(page, "/v1/models*", sets | {"model_set": "second"})
    page.route("**/v1/classify*", lambda route: None)  # no answer yet
    page.locator("#model-set").select_option("second")
    expect(page.locator(".card:disabled")).to_have_count(2)
    expect(page.locator(".card .said")).to_have_count(0)


def test_a_file_that_can_no_longer_be_read_is_named(open_page, photo_file):
    """The browser calls it a failed connection."""
    page = open_page(expected_failures=("/v1/classify",))
    page.route("**/v1/classify*", lambda route: route.abort())
    page.evaluate("() => { File.prototype.slice = () => { throw new Error('changed') } }")
    drop(page, photo_file)
    expect(page.get_by_role("alert")).to_contain_text(f"{photo_file[0]} cannot be read")
    expect(page.get_by_role("button", name="Try again")).to_be_hidden()


def test_what_was_broken_off_offers_another_try(open_page, photo_file):
    page = open_page(expected_failures=("/v1/classify",))
    error = {"error": {"code": "broken_off", "message": "It ended: try again."}}
    answered(page, error, photo_file, status=502)
    expect(page.locator("#headline")).to_have_text("Broken off")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()


@pytest.mark.parametrize(("task", "is_forced"), [("multi_class", True), ("multi_label", False)])
def test_what_is_said_of_other_pictures(open_page, task, is_forced):
    models = {"model_set": "a", "labels": ["tench"], "members": [], "task": task}
    page = open_page(prepare=lambda page: fulfil(page, "/v1/models", models))
    expect(page.locator("#classes")).to_contain_text("a, knows 1 classes")
    expect(page.locator("#forced")).to_be_visible(visible=is_forced)


def test_what_the_server_and_files_are_called_is_never_markup(open_page, photo_file):
    hostile = "<img src=x onerror=alert(1)><b>bold</b>"
    page = open_page(expected_failures=("/v1/classify",))
    result = an_answer(hostile, request_id=hostile)
    error = {"error": {"code": "not_an_image", "message": hostile}}
    answered(page, {"results": [result, error]}, (hostile, *photo_file[1:]), photo_file)
    expect(page.locator("#headline")).to_have_text(hostile)
    expect(page.locator(".wrong")).to_have_text(hostile)
    expect(page.locator(".card .name").first).to_have_text(hostile)
    assert page.locator("b, [onerror]").count() == 0


def test_a_service_that_is_not_ready_is_waited_for(open_page, photo_file, photo_label):
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


def test_a_full_service_offers_another_try(open_page, photo_file, photo_label):
    page = open_page(expected_failures=("/v1/classify",))
    error = {"error": {"code": "overloaded", "message": "64 requests are waiting."}}
    answered(page, error, photo_file, status=429)
    expect(page.get_by_role("alert")).to_contain_text("Try again in a moment. (64 requests are")
    page.unroute_all()
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#headline")).to_have_text(photo_label)


def test_only_the_pictures_that_failed_are_sent_again(open_page, photo_file):
    page = open_page(expected_failures=("/v1/classify",))
    failed = {"error": {"code": "overloaded", "message": "64 requests are waiting."}}
    sent = []

    def answer(route: Route) -> None:
        sent.append(route.request.url)
        is_first = len(sent) == 1
        route.fulfill(status=429 if is_first else 200, json=failed if is_first else an_answer())

    page.route("**/v1/classify*", answer)
    others = [(f"{i}.jpg", "image/jpeg", bytes([i]) * 9) for i in range(2)]
    drop(page, *others, photo_file)
    expect(page.locator(".card .said")).to_have_count(2)
    expect(page.locator(".card").first.locator(".wrong")).to_contain_text("Try again in a moment")
    page.get_by_role("button", name="Try 1 again").click()
    expect(page.locator(".card .said")).to_have_count(3)
    assert len(sent) == 4
    expect(page.locator("#retry")).to_be_hidden()


def test_a_picture_that_came_too_late_twice_is_explained(open_page, photo_file):
    page, sent = open_page(expected_failures=("/v1/classify",)), []
    page.on("request", lambda request: sent.append(request.url))
    late = {"error": {"code": "slow_body", "message": "allow more time (request_timeout_s)"}}
    answered(page, late, photo_file, status=408)
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("too slow for this picture")
    expect(problem).not_to_contain_text("request_timeout_s")
    assert len([url for url in sent if "/v1/classify" in url]) == 2


def test_a_picture_that_the_browser_cannot_shrink_is_not_sent_again(open_page):
    page, sent = open_page(expected_failures=("/v1/classify",)), []
    page.on("request", lambda request: sent.append(request.url))
    late = {"error": {"code": "slow_body", "message": "allow more time (request_timeout_s)"}}
    answered(page, late, ("phone.heic", "image/heic", b"ftypheic" * 99), status=408)
    expect(page.get_by_role("alert")).to_contain_text("Save it as a JPEG first")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    assert len([url for url in sent if "/v1/classify" in url]) == 1


def test_how_much_of_a_picture_was_sent_is_shown(open_page, photo_file):
    page = open_page()
    page.context.new_cdp_session(page).send(
        "Network.emulateNetworkConditions",
        {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 50_000},
    )
    noise = ("noise.bmp", "image/bmp", bytes(200_000))  # of a kind that is not shrunk
    drop(page, noise)
    expect(page.locator("#headline")).to_have_text(re.compile(r"Sending, \d+%"))
