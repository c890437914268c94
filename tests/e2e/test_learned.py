"""A learned set in a real service: served, taught, its next version in the shadow, promoted."""

import base64
import json

import httpx
import pytest
from playwright.sync_api import expect

from calibration.learning.features import FeatureCache
from calibration.learning.learn import Request, learn
from models.model_set import load_model_set
from tests.support.calibration.noisy_pictures import write_noisy
from tests.support.services.live_service import changed_config, run_tandem
from tests.support.services.page_driver import MAKE_TRANSFER, drop, watched
from tests.support.services.processes import wait_until

pytestmark = pytest.mark.slow
WITHIN_S = 60.0
NUM_COMPARED = 30


@pytest.fixture(scope="module")
def versions(tiny_set, tmp_path_factory):
    """A learned set, and its next version with a further class; NAME@VERSION of each."""
    work = tmp_path_factory.mktemp("learned")
    cache, origin = FeatureCache(work / "features"), load_model_set(str(tiny_set))
    first = learn(Request("own", [write_noisy(work / "first", 12)], work, origin), cache).model_set
    more = [write_noisy(work / "more", 8, 3)]
    second = learn(Request("own", more, work, first, before=first), cache).model_set
    return [f"{second.folder}@{each.fingerprint()}" for each in (first, second)]


def test_a_learned_set_is_served_compared_and_promoted(
    versions, start_service, tmp_path_factory, tmp_path
):
    with changed_config(folder := tmp_path_factory.mktemp("config")) as content:
        arguments = content["applications"][0]["args"]
        arguments.pop("model_set", None)
        arguments |= {"traffic": {versions[0]: 100, versions[1]: 0}, "shadow": versions[1]}
        arguments |= {"compare_ratio": 0.5, "cache": "none", "copy_share": 0.1}
    service = start_service("--config", str(folder / "serve_config.yaml"))
    pictures = sorted(write_noisy(tmp_path / "new", 10, 21).glob("*/*.png"))
    before, after = (version[-12:] for version in versions)

    def answered() -> set[str]:
        seen = set()
        for picture in pictures:
            answer = httpx.post(
                f"{service.url}/v1/classify", content=picture.read_bytes(), trust_env=False
            ).json()
            assert answer["predictions"][0]["label"] == picture.parent.name
            seen.add(answer["model_version"])
        return seen

    def traffic(*words: str) -> str:
        done = run_tandem("traffic", *words, "--url", service.url, exit_code=None)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    def num_compared() -> int:
        answered()
        return sum(pair["compared"] for pair in json.loads(traffic("--json"))["comparisons"])

    assert answered() == {before}
    wait_until(lambda: num_compared() >= NUM_COMPARED, WITHIN_S, "comparisons in the shadow")
    names = [f"own@{version[-12:]}" for version in versions]
    traffic("set", f"{names[0]}=50", f"{names[1]}=50")
    assert answered() == {before, after}
    traffic("promote", names[1], "--min-compared", str(NUM_COMPARED))
    assert answered() == {after}


@pytest.fixture(scope="module")
def taught(tiny_set, tmp_path_factory, start_service):
    """A service that keeps samples, takes feedback and is taught, and the set that it serves."""
    work = tmp_path_factory.mktemp("taught")
    images = ("--images", write_noisy(work / "first", 12), "--from", tiny_set)
    assert run_tandem("learn", "own", "--into", work, *images).returncode == 0
    learned = load_model_set(str(work / "own"))
    with changed_config(folder := tmp_path_factory.mktemp("config")) as content:
        arguments = content["applications"][0]["args"]
        arguments.pop("model_set", None)
        arguments |= {"traffic": {f"{learned.folder}@{learned.fingerprint()}": 100}}
        arguments |= {"teach": True, "teach_dir": str(work / "kept" / "taught"), "feedback": True}
        arguments |= {"sample_ratio": 1.0, "sample_dir": str(work / "kept" / "samples")}
    return start_service("--config", str(folder / "serve_config.yaml")), work


@pytest.fixture(scope="module")
def service_url(taught) -> str:
    return taught[0].url


@pytest.mark.browser
def test_what_people_teach_is_the_next_version_in_the_shadow(taught, browser, tmp_path):
    service, work = taught
    pictures = write_noisy(tmp_path / "new", 6, 31)
    files = {
        name: [(path.name, "image/png", path.read_bytes()) for path in (pictures / name).iterdir()]
        for name in ("blue", "red")
    }
    with watched(browser, service.url, ()) as page:
        page.goto(f"{service.url}/")
        tile = page.locator(".tile[data-label=blue]")
        encoded = [(n, kind, base64.b64encode(data).decode()) for n, kind, data in files["blue"]]
        transfer = page.evaluate_handle(MAKE_TRANSFER, encoded[:4])
        tile.dispatch_event("drop", {"dataTransfer": transfer})
        expect(page.locator("#taught")).to_have_text("Kept as blue: 4 photographs. Undo")
        expect(tile).to_contain_text("4 photographs")
        drop(page, files["red"][0])
        expect(page.locator("#headline")).to_have_text("red")
        page.locator("#right").select_option("blue")
        page.locator("#correct button").first.click()
        expect(page.locator("#corrected")).to_have_text("Kept as blue: 1 photograph. Undo")
        page.locator("#right").select_option("none")
        page.locator("#correct button").first.click()
        expect(page.locator("#corrected")).to_have_text("Kept as none of these: 1 photograph. Undo")
        page.locator("#corrected button").click()
        expect(page.locator("#corrected")).to_have_text("Erased.")
        drop(page, files["red"][2])
        expect(page.locator("#headline")).to_have_text("red")
        page.locator("#right").select_option("blue")
        page.locator("#correct button").first.click()
        expect(page.locator("#corrected")).to_have_text("Kept as blue: 1 photograph. Undo")
    data = files["red"][1][2]
    answer = httpx.post(f"{service.url}/v1/classify", content=data, trust_env=False).json()
    told = {"request_id": answer["request_id"], "label": "green"}
    assert httpx.post(f"{service.url}/v1/feedback", json=told, trust_env=False).is_success
    figures = httpx.get(f"{service.url}/v1/teach", trust_env=False).json()
    assert (figures["labels"], figures["corrections"]) == ({"blue": 5}, 1)
    wait_until(
        lambda: len(list((work / "kept" / "samples").glob("*.json"))) >= 2, WITHIN_S, "samples"
    )

    before = {path.name for path in (work / "own").glob(".versions/*")}
    done = run_tandem(
        *("learn", "own", "--into", work, "--corrections", work / "kept"),
        *("--shadow", service.url, "--json", tmp_path / "learned.json"),
        exit_code=None,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "learned.json").read_text())["num_photographs"] == 36 + 6
    assert len({path.name for path in (work / "own").glob(".versions/*")} - before) == 1
    status = json.loads(run_tandem("traffic", "--json", "--url", service.url).stdout)
    newest = load_model_set(str(work / "own")).fingerprint()
    assert status["shadow"] == f"own@{newest}" != status["main"]
