"""A learned set in a real service: served, its next version in the shadow, then promoted."""

import json

import httpx
import pytest

from calibration.learning.features import FeatureCache
from calibration.learning.learn import Request, learn
from models.model_set import load_model_set
from tests.support.calibration.noisy_pictures import write_noisy
from tests.support.services.live_service import changed_config, run_tandem
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
