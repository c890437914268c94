"""Samples, drift and feedback of a real service with two Gateways.

In the fast tier: tests/unit/samples, and tests/unit/calibration/test_drift.py.
"""

import json
from functools import partial

import httpx
import pytest

from app.telemetry.metric_table import FEEDBACK, SAMPLES
from models.model_set import load_model_set
from tests.support.command_line import tandem
from tests.support.exposed_metrics import exposed
from tests.support.services.live_service import Service, drawn_photo
from tests.support.services.processes import EVENTUALLY_S, wait_until

pytestmark = pytest.mark.slow
NUM_PHOTOS = 60
LABELS = load_model_set("imagenette").labels


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "samples"


@pytest.fixture(scope="module")
def sampled(start_service, samples) -> Service:
    args = {"sample_ratio": 1.0, "sample_dir": str(samples), "feedback": True}
    return start_service(args=args, gateways=2)


@pytest.fixture(scope="module")
def answers(sampled) -> dict[str, str]:
    """The label of each of the photos that were sent, by the request's id."""
    given = {}
    with httpx.Client(base_url=sampled.url, timeout=60) as client:
        for seed in range(NUM_PHOTOS):
            photo = drawn_photo(seed, 160, 120)
            answer = client.post("/v1/classify", content=photo).raise_for_status().json()
            given[answer["request_id"]] = answer["predictions"][0]["label"]
    assert len(given) == NUM_PHOTOS
    return given


def kept(samples):
    return sorted(samples.glob("*.json"))


def test_samples_are_the_answers_and_show_no_drift(answers, samples, tmp_path):
    wait_until(lambda: len(kept(samples)) == NUM_PHOTOS, EVENTUALLY_S, "samples")
    rows = [json.loads(path.read_text()) for path in kept(samples)]
    assert {row["request_id"]: row["predictions"][0]["label"] for row in rows} == answers
    sent = {drawn_photo(seed, 160, 120) for seed in range(NUM_PHOTOS)}
    assert {(samples / row["file"]).read_bytes() for row in rows} == sent

    record = tmp_path / "answers.jsonl"  # the same networks, without a service
    done = tandem("classify-offline", samples, "--out", record)
    assert done.exit_code == 0, done.output
    done = tandem("drift", "--reference", record, "--samples", samples)
    assert done.exit_code == 0, done.output
    assert f"no drift: {NUM_PHOTOS} samples and {NUM_PHOTOS} references" in done.output
    assert "note" not in done.output  # the version is the same


def test_feedback_through_any_gateway(sampled, answers):
    (first, label), (second, other), *_ = answers.items()
    wrong = next(name for name in LABELS if name != other)
    with httpx.Client(base_url=sampled.url, timeout=60) as client:

        def report(request_id: str, said: str) -> httpx.Response:
            return client.post("/v1/feedback", json={"request_id": request_id, "label": said})

        for request_id, said, is_right in ((first, label, True), (second, wrong, False)):
            told = report(request_id, said).raise_for_status().json()
            assert (told["right"], told["answered"]) == (is_right, [answers[request_id]])
        assert report(first, label).status_code == 200  # again: counted once
        refused = [report(first, wrong), report(second, "no such label"), report("x", label)]
        assert [answer.status_code for answer in refused] == [409, 422, 404]
        assert f"there are {NUM_PHOTOS} answers" in refused[2].json()["error"]["message"]
        figures = client.get("/v1/feedback").json()
    (version,) = figures["versions"]
    expected = load_model_set("imagenette").fingerprint()
    assert (version["model_set"], version["model_version"]) == ("imagenette", expected)
    assert (version["feedback"], version["right"], version["accuracy"]) == (2, 1, 0.5)


def test_metrics(sampled, answers, samples):
    def counted(name: str, tag: str) -> float:
        lines = httpx.get(sampled.metrics_url, timeout=10).text.splitlines()
        wanted = [line for line in lines if line.startswith(f"{name}{{") and tag in line]
        return sum(float(line.rpartition(" ")[2]) for line in wanted)

    (written,), (feedback,) = exposed(SAMPLES), exposed(FEEDBACK)

    def is_counted_once(tag: str) -> bool:
        return counted(feedback, tag) == 1

    wait_until(lambda: counted(written, 'result="written"') == NUM_PHOTOS, EVENTUALLY_S, written)
    for tag in ('right="yes"', 'right="no"'):  # of two Gateways, which report each at its time
        wait_until(partial(is_counted_once, tag), EVENTUALLY_S, feedback)


def test_what_is_kept_of_a_request_is_erased(sampled, answers, samples):
    """Last: the others count the samples."""
    request_id = next(iter(answers))
    with httpx.Client(base_url=sampled.url, timeout=60) as client:
        answer = client.delete(f"/v1/samples/{request_id}").raise_for_status().json()
    assert (answer["erased"], answer["num_gateways"], answer["num_current"]) == (1, 2, 2)
    left = {json.loads(path.read_text())["request_id"] for path in kept(samples)}
    assert left == answers.keys() - {request_id}
    assert len(list(samples.iterdir())) == 2 * len(left)
