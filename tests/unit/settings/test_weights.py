"""The setting weights: which members are served, and what they weigh."""

import numpy as np
import pytest
from pydantic import ValidationError

from app.deployments.assembly import assemble
from app.deployments.combiner import Combiner
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.launch.config import ServeConfig
from app.settings import Settings
from models.errors import ModelSetError
from tests.support.configurations import ROOT
from tests.support.tiny_networks import picture


def settings_of(tiny_set, **settings: object) -> Settings:
    return Settings(model_set=str(tiny_set), compile_cache=None, **settings)


async def test_only_these_members_are_compiled_and_asked(tiny_set):
    graph = assemble(settings_of(tiny_set, weights={"unsure": 2.0}))
    request = ClassifyRequest([picture("red")], 1, 60.0, "id", RequestObserver())
    (answer,) = await graph.service.classify(request)
    assert answer.members.keys() == {"unsure"}
    assert answer.predictions[0].label == "mostly red"
    (served,) = graph.service.served_models().members
    assert (served.name, served.weight) == ("unsure", 2.0)


async def test_the_average_has_these_weights(tiny_set):
    combiner = Combiner(settings_of(tiny_set, weights={"sure": 0.25, "unsure": 0.75}))
    rows = {"sure": np.array([[1, 0, 0]], np.float32), "unsure": np.array([[0, 1, 0]], np.float32)}
    (answer,) = await combiner.combine(rows, 2)
    assert [p.probability for p in answer.predictions] == [0.75, 0.25]


def test_other_weights_are_another_set_to_caches_and_updates(tiny_set):
    some = [None, {"sure": 1.0}, {"sure": 2.0, "unsure": 1.0}, {"sure": 1.0, "unsure": 2.0}]
    found = {settings_of(tiny_set, weights=w).load_set().fingerprint() for w in some}
    assert len(found) == len(some)


def test_a_member_that_is_not_there(tiny_set):
    with pytest.raises(ModelSetError, match="has no member 'other'; it has: sure, unsure"):
        settings_of(tiny_set, weights={"other": 1.0}).load_set()


@pytest.mark.parametrize("weights", [{}, {"sure": 0}, {"sure": -1}, {"sure": float("nan")}, ["a"]])
def test_what_is_refused(weights):
    with pytest.raises(ValidationError, match="weights"):
        Settings(weights=weights)


def test_deployments_are_fitted_to_the_members_that_are_served(tiny_set):
    config = ServeConfig.read(ROOT / "configs" / "separate.yaml")
    config = config.with_arguments(model_set=str(tiny_set), weights={"sure": 1.0})
    fitted = config.fitted_to(config.settings.load_set().manifest)
    assert {d["name"] for d in fitted.deployments} == {"Gateway", "Decoder", "sure"}
