"""A multi-label set in the graph: lists above a threshold, in answers and from the cache."""

import json

import numpy as np
import pytest

from app.answers import Classified, as_json
from app.errors import BadParameterError, ConfigError
from app.graph.request import RequestOptions
from app.graph.service import EnsembleService
from app.graph.set_checks import check_task
from app.settings import Settings
from app.stages.combiner import Combiner
from models.ensemble import Prediction
from models.model_set import load_model_set
from tests.support.fakes import answers_of
from tests.support.scored_service import scored_service as service
from tests.support.scored_sets import (
    GAINS,
    PICTURES,
    average_score,
    score,
    scored_picture,
    write_scored_set,
)

WEIGHTS = {"steep": 3.0, "flat": 1.0}


@pytest.fixture(scope="module")
def scored_set(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_scored_set(tmp_path_factory.mktemp("scored"), weights=WEIGHTS))


async def ask(
    asked: EnsembleService, name: str, top_k: int | None = None, threshold: float | None = None
) -> Classified:
    options = RequestOptions("r", top_k, threshold=threshold)
    (answer,) = await answers_of(asked, options, scored_picture(name))
    assert isinstance(answer, Classified)
    return answer


def listed(predictions: list[Prediction]) -> dict[str, float]:
    return {one.label: one.probability for one in predictions}


@pytest.mark.parametrize("as_handles", [False, True], ids=["local objects", "handles"])
@pytest.mark.parametrize("name", PICTURES)
async def test_an_answer_lists_what_the_average_of_sigmoids_has_above_one_half(
    scored_set, name, as_handles
):
    colour, labels = PICTURES[name]
    answer = await ask(service(scored_set, as_handles=as_handles), name, 3)
    expected = average_score(colour, WEIGHTS)
    assert set(listed(answer.predictions)) == set(labels)
    for one in answer.predictions:
        assert one.probability == pytest.approx(expected[one.index], abs=1e-5)
    for member, opinion in answer.members.items():
        own = score(colour, GAINS[member])
        assert {p.index for p in opinion.predictions} == set(np.flatnonzero(own >= 0.5))
        assert (opinion.label is None) == (not opinion.predictions)
    assert answer.agreement
    assert answer.threshold == 0.5


async def test_an_answer_without_labels_is_rendered_without_what_is_not_there(scored_set):
    told = json.loads(as_json(await ask(service(scored_set), "black")))
    assert told["predictions"] == []
    assert told["members"] == {name: {"predictions": []} for name in GAINS}
    assert told["threshold"] == 0.5


async def test_a_request_may_ask_for_another_threshold_and_for_fewer(scored_set):
    asked = service(scored_set, as_handles=True)
    expected = average_score(PICTURES["red"][0], WEIGHTS)
    answer = await ask(asked, "red", 3, threshold=0.01)
    assert answer.threshold == 0.01
    assert [p.index for p in answer.predictions] == np.argsort(-expected).tolist()
    assert len((await ask(asked, "white", 2)).predictions) == 2
    assert (await ask(asked, "white", 3, threshold=0.9999)).predictions == []


@pytest.mark.parametrize("threshold", [0.0, 1.0, -1.0, float("nan"), float("inf")])
async def test_a_threshold_that_is_none(scored_set, threshold):
    with pytest.raises(BadParameterError, match=r"threshold is .*above 0 and below 1"):
        await ask(service(scored_set), "red", threshold=threshold)


async def test_a_hit_of_the_cache_is_listed_by_its_own_requests_threshold(scored_set):
    asked = service(scored_set, cache="local")
    first = await ask(asked, "cyan", 3)
    again, wide = await ask(asked, "cyan", 3), await ask(asked, "cyan", 3, threshold=0.001)
    assert (first.cached, again.cached, wide.cached) == (None, True, True)
    assert first.predictions == again.predictions
    assert len(wide.predictions) == 3
    assert again.threshold == 0.5


def test_the_set_says_its_task(scored_set):
    told = service(scored_set).served_models()
    assert (told.task, told.threshold) == ("multi_label", 0.5)


def test_another_threshold_is_another_set(tmp_path, scored_set):
    other = write_scored_set(tmp_path / "other", weights=WEIGHTS, threshold=0.25)
    one, two = load_model_set(scored_set), load_model_set(str(other))
    assert one.fingerprint() != two.fingerprint()
    assert two.answer_rule.threshold == 0.25


def test_a_cascade_is_refused(scored_set):
    settings = Settings(model_set=scored_set, cascade_margin=0.5)
    with pytest.raises(ConfigError, match=r"cascade_margin is 0\.5, and scored is multi-label"):
        check_task(settings.cascade_margin, load_model_set(scored_set).manifest)
    with pytest.raises(ConfigError, match="multi-label"):
        service(scored_set, cascade_margin=0.5)


async def test_a_quorum_averages_who_is_there(scored_set):
    combiner = Combiner(Settings(model_set=scored_set))
    (answer,) = await combiner.combine({"flat": np.array([[0.6, 0.7, 0.1]], np.float32)}, 3)
    assert listed(answer.predictions) == pytest.approx({"has green": 0.7, "has blue": 0.6})
