"""The version of the set that answers: the same in answers, in what is served, metrics, traces."""

import pytest

from app.answers import Classified
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.grpc.interface import reply_of
from app.settings import Settings
from app.stages.combiner import Combiner
from app.telemetry.metric_table import ANSWERS
from models.model_set import load_model_set
from tests.support.fakes import FakeDecoder, FakeMember, service_of
from tests.support.instruments import Instruments


@pytest.mark.parametrize("cache", ["none", "local"])
async def test_answers_computed_or_kept_say_which_version(tiny_set, cache, told: Instruments):
    settings = Settings(model_set=str(tiny_set), cache=cache)
    members = {"sure": FakeMember(), "unsure": FakeMember()}
    service = service_of(settings, FakeDecoder(), members, Combiner(settings))
    version = load_model_set(str(tiny_set)).fingerprint()
    for _ in range(2):
        request = ClassifyRequest([b"good"], 1, 10.0, "id", RequestObserver())
        (answer,) = await service.classify(request)
        assert isinstance(answer, Classified)
        assert answer.model_version == version
        assert reply_of([answer], "id").results[0].classified.model_version == version
    assert service.served_models().model_version == version
    assert {tags[-1] for tags in told.of(ANSWERS)} == {version}
