"""A multi-label set through the real commands: added, verified, served, evaluated, compared.

In the fast tier: adding in tests/unit/calibration/sets/test_add_multi_label.py, answers in
tests/unit/graph/test_ensemble.py, evaluation in tests/unit/calibration/evaluation.
"""

import httpx
import numpy as np
import openvino as ov
import pytest

from models.manifest import read_manifest
from tests.support import scored_sets
from tests.support.services.live_service import live_report, tandem_of

pytestmark = pytest.mark.slow
WEIGHTS = {"steep": 2.0, "flat": 1.0}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Add a set of two networks that end in a sigmoid; nobody says that it is multi-label."""
    folder = tmp_path_factory.mktemp("multi-label")
    (folder / "labels.txt").write_text("\n".join(scored_sets.LABELS), "utf-8")
    for name, gain in scored_sets.GAINS.items():
        ov.save_model(scored_sets.scored_model(gain), folder / f"{name}.xml")
    members = [f"--member={name}={folder / name}.xml" for name in scored_sets.GAINS]
    labels = ("--labels", folder / "labels.txt", "--weight", "steep=2")
    said = tandem_of(folder, "models", "add", "colours", *members, *labels)
    assert "multi_label, since every network ends in a sigmoid" in said
    assert "labels with a score of 0.5 or more" in said
    return folder


def test_the_live_answer_is_the_average_of_sigmoids(home, start_service):
    folder = home / "tandem" / "models" / "colours"
    assert read_manifest(folder).task == "multi_label"
    tandem_of(home, "models", "verify", "colours")
    images = scored_sets.write_scored_images(home / "images", num_per_picture=5)
    assert "mAP" in tandem_of(home, "evaluate", "colours", "--images", images)
    service = start_service("--model-set", str(folder), args={"precision": "FP16"})
    for name, (colour, labels) in scored_sets.PICTURES.items():
        _check_answer(service.url, name, colour, labels)
    assert live_report(service.url, "colours", "--images", images, home=home)["num_images"] == 20
    files, at = (_file(home, "black"), _file(home, "cyan")), ("--url", service.url)
    page = tandem_of(home, "classify", *files, *at, "--top-k", "3")
    assert "no label" in page
    assert "has green" in page
    service.stop()


def _file(home, name):
    path = home / f"{name}.png"
    path.write_bytes(scored_sets.scored_picture(name))
    return path


def _check_answer(url, name, colour, labels):
    told = httpx.post(
        f"{url}/v1/classify?top_k=3", content=scored_sets.scored_picture(name), timeout=60
    ).json()
    expected = scored_sets.average_score(colour, WEIGHTS)
    assert {one["label"] for one in told["predictions"]} == set(labels)
    scores = [one["probability"] for one in told["predictions"]]
    assert scores == sorted(scores, reverse=True)
    for one in told["predictions"]:
        assert abs(one["probability"] - expected[one["index"]]) < 1e-5
    for member, opinion in told["members"].items():
        own = scored_sets.score(colour, scored_sets.GAINS[member])
        found = {one["index"]: one["probability"] for one in opinion["predictions"]}
        assert found.keys() == set(np.flatnonzero(own >= 0.5).tolist())
        assert all(abs(value - own[index]) < 1e-5 for index, value in found.items())
