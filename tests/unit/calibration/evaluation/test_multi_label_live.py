"""A running service's lists of labels beside those of this process."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from calibration.datasets import MultiLabelledImage
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.live import MultiLabelLiveService
from models.errors import ModelSetError
from models.manifest import ENSEMBLE
from models.model_set import ModelSet, load_model_set
from tests.support.scored_sets import (
    GAINS,
    PICTURES,
    average_score,
    score,
    write_scored_set,
)
from tests.support.scored_sets import (
    LABELS as SCORED_LABELS,
)

COLOUR = PICTURES["cyan"][0]
EQUAL = {"steep": 1.0, "flat": 1.0}
ROWS = {name: score(COLOUR, gain) for name, gain in GAINS.items()}
ROWS[ENSEMBLE] = average_score(COLOUR, EQUAL)
MODELS = {
    "model_set": "scored",
    "labels": list(SCORED_LABELS),
    "members": [{"name": name, "precision": "INT8"} for name in GAINS],
    "task": "multi_label",
    "threshold": 0.5,
}


def listed(row) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"index": i, "label": "", "probability": float(p)} for i, p in enumerate(row)
    ]
    return [one for one in found if one["probability"] >= 0.5]


def an_answer(**changes: object) -> dict[str, object]:
    members = {name: {"predictions": listed(ROWS[name])} for name in GAINS}
    return {"predictions": listed(ROWS[ENSEMBLE]), "members": members} | changes


@pytest.fixture(scope="module")
def scored_set(tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    return load_model_set(str(write_scored_set(tmp_path_factory.mktemp("scored"))))


class Service:
    """What the comparison finds of a service that answers as it is told."""

    def __init__(self, model_set: ModelSet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model_set, self.models, self.answer = model_set, dict(MODELS), an_answer()
        self.asked: list[str] = []
        real = httpx.Client

        def client(**options: Any) -> httpx.Client:
            return real(transport=httpx.MockTransport(self._answer), **options)

        monkeypatch.setattr(httpx, "Client", client)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        told = self.models if request.url.path == "/v1/models" else self.answer
        return httpx.Response(200, content=json.dumps(told))

    def compared(self, classes: tuple[int, ...] = (0, 1)):
        image = MultiLabelledImage(Path("cyan.png"), classes)
        rows = {name: row[None] for name, row in ROWS.items()}
        with MultiLabelLiveService("http://service", self.model_set) as service:
            answering: Any = service
            answering.observe(AnsweredBatch([image], [b"cyan"], {"INT8": rows}, []))
            return service.result


@pytest.fixture
def service(scored_set, monkeypatch) -> Service:
    return Service(scored_set, monkeypatch)


def test_the_same_lists(service):
    result = service.compared()
    assert result.is_same, result.differences
    assert result.num_right == {"steep": 1, "flat": 1, ENSEMBLE: 1}
    assert service.asked[-1].endswith("top_k=3")  # all labels that may be listed


def test_all_labels_must_be_right(service):
    result = service.compared(classes=(0,))
    assert result.is_same
    assert set(result.num_right.values()) == {0}


def test_a_label_that_the_service_does_not_list(service):
    service.answer = an_answer(predictions=listed(ROWS[ENSEMBLE])[:1])
    (line,) = service.compared().differences
    assert line == "cyan.png: ensemble: label 1 is listed in process alone"


def test_a_label_that_the_service_alone_lists(service):
    more = {"index": 2, "label": "", "probability": 0.9}
    service.answer = an_answer(predictions=[more, *listed(ROWS[ENSEMBLE])])
    assert "label 2 is listed live alone" in service.compared().differences[0]
    service.answer = an_answer(predictions=[more | {"index": 9}])
    assert not service.compared().is_same


def test_a_score_that_is_off(service):
    first, second = listed(ROWS[ENSEMBLE])
    service.answer = an_answer(predictions=[first | {"probability": 0.7}, second])
    assert "score 0.7000 of label 0 live" in service.compared().differences[0]


def test_a_member_that_did_not_answer_and_what_is_no_answer(service):
    members = {"steep": {"predictions": listed(ROWS["steep"])}}
    service.answer = an_answer(members=members)
    assert "flat did not answer" in service.compared().differences[0]
    service.answer = an_answer(predictions=[{"index": "x"}])
    assert "no answer as Tandem gives" in service.compared().differences[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"threshold": 0.4}, r"with a threshold of 0\.4, here it is 0\.5"),
        ({"task": "classification"}, "serves scored as classification, here it is multi_label"),
    ],
)
def test_a_service_of_another_task_or_threshold(service, changes, says):
    service.models |= changes
    with pytest.raises(ModelSetError, match=says):
        service.compared()
