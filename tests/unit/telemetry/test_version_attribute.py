"""The version of the model set on a request's span."""

from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.settings import Settings
from app.stages.combiner import Combiner
from models.model_set import load_model_set
from tests.support.fakes import FakeDecoder, FakeMember, service_of


async def test_the_requests_span_says_which_version_answered(tiny_set, exported, request_span):
    settings = Settings(model_set=str(tiny_set))
    service = service_of(settings, FakeDecoder(), {"sure": FakeMember()}, Combiner(settings))
    await service.classify(ClassifyRequest([b"good"], 1, 10.0, "id", RequestObserver()))
    version = load_model_set(str(tiny_set)).fingerprint()
    assert request_span.attributes["tandem.model_version"] == version
