"""A multi-label set in the graph: lists above a threshold, in answers and from the cache."""

import numpy as np
import pytest

from app.answers import Classified
from app.errors import ConfigError
from app.graph.request import RequestOptions
from app.graph.served_models import check_plan
from app.settings import Settings
from app.stages.combiner import Combiner
from models.model_set import load_model_set
from tests.support import fakes, scored_sets
from tests.support.scored_service import scored_service as service

WEIGHTS = {"steep": 3.0, "flat": 1.0}


@pytest.fixture(scope="module")
def scored_set(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(scored_sets.write_scored_set(tmp_path_factory.mktemp("scored"), weights=WEIGHTS))


async def ask(asked, name, top_k=None, threshold=None):
    options = RequestOptions("r", top_k, threshold=threshold)
    (answer,) = await fakes.answers_of(asked, options, scored_sets.scored_picture(name))
    assert isinstance(answer, Classified)
    return answer


def listed(predictions):
    return {one.label: one.probability for one in predictions}


@pytest.mark.parametrize("as_handles", [False, True], ids=["local objects", "handles"])
@pytest.mark.parametrize("name", scored_sets.PICTURES)
async def test_an_answer_lists_what_the_average_of_sigmoids_has_above_one_half(
    scored_set, name, as_handles
):
    colour, labels = scored_sets.PICTURES[name]
    answer = await ask(service(scored_set, as_handles=as_handles), name, 3)
    expected = scored_sets.average_score(colour, WEIGHTS)
    assert set(listed(answer.predictions)) == set(labels)
    for one in answer.predictions:
        assert one.probability == pytest.approx(expected[one.index], abs=1e-5)
    for member, opinion in answer.members.items():
        own = scored_sets.score(colour, scored_sets.GAINS[member])
        assert {p.index for p in opinion.predictions} == set(np.flatnonzero(own >= 0.5))
        assert (opinion.label is None) == (not opinion.predictions)
    assert answer.agreement
    assert answer.threshold == 0.5


async def test_a_request_may_ask_for_another_threshold_and_for_fewer(scored_set):
    asked = service(scored_set, as_handles=True)
    expected = scored_sets.average_score(scored_sets.PICTURES["red"][0], WEIGHTS)
    answer = await ask(asked, "red", 3, threshold=0.01)
    assert answer.threshold == 0.01
    assert [p.index for p in answer.predictions] == np.argsort(-expected).tolist()
    assert len((await ask(asked, "white", 2)).predictions) == 2
    assert (await ask(asked, "white", 3, threshold=0.9999)).predictions == []


async def test_a_hit_of_the_cache_is_listed_by_its_own_requests_threshold(scored_set):
    asked = service(scored_set, cache="local")
    first = await ask(asked, "cyan", 3)
    again, wide = await ask(asked, "cyan", 3), await ask(asked, "cyan", 3, threshold=0.001)
    assert (first.cached, again.cached, wide.cached) == (None, True, True)
    assert (first.predictions, len(wide.predictions)) == (again.predictions, 3)
    assert again.threshold == 0.5


def test_another_threshold_is_another_set(tmp_path, scored_set):
    other = scored_sets.write_scored_set(tmp_path / "other", weights=WEIGHTS, threshold=0.25)
    one, two = load_model_set(scored_set), load_model_set(str(other))
    assert one.fingerprint() != two.fingerprint()
    assert two.answer_rule.threshold == 0.25


def test_a_fast_plan_is_refused(scored_set):
    settings = Settings(model_set=scored_set, plan="fast")
    with pytest.raises(ConfigError, match=r"plan is fast, and scored is multi-label"):
        check_plan(settings, load_model_set(scored_set))
    with pytest.raises(ConfigError, match="multi-label"):
        service(scored_set, plan="fast")


async def test_a_quorum_averages_who_is_there(scored_set):
    combiner = Combiner(Settings(model_set=scored_set))
    (answer,) = await combiner.combine({"flat": np.array([[0.6, 0.7, 0.1]], np.float32)}, 3)
    assert listed(answer.predictions) == pytest.approx({"has green": 0.7, "has blue": 0.6})
