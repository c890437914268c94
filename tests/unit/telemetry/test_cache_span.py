"""The response cache's span in a request's trace."""

from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.settings import Settings
from app.stages.combiner import Combiner
from tests.support.fakes import FakeDecoder, FakeMember, service_of


async def test_a_look_into_the_cache_is_a_span(tiny_set, exported, request_span):
    settings = Settings(model_set=str(tiny_set), cache="local")
    members = {"sure": FakeMember(), "unsure": FakeMember()}
    service = service_of(settings, FakeDecoder(), members, Combiner(settings))
    for files in ([b"good"], [b"good", b"good two", b"good two"]):
        await service.classify(ClassifyRequest(files, 1, 10.0, "id", RequestObserver()))
    first, second = [span for span in exported.get_finished_spans() if span.name == "cache"]
    found = [
        {name.removeprefix("tandem.cache."): n for name, n in span.attributes.items()}
        for span in (first, second)
    ]
    assert found == [
        {"hit": 0, "miss": 1, "shared": 0},
        {"hit": 1, "miss": 1, "shared": 1},
    ]
    assert second.parent.span_id == request_span.context.span_id
    assert second.start_time <= second.end_time


async def test_without_a_cache_there_is_none(tiny_set, exported, request_span):
    settings = Settings(model_set=str(tiny_set))
    members = {"sure": FakeMember()}
    service = service_of(settings, FakeDecoder(), members, Combiner(settings))
    await service.classify(ClassifyRequest([b"good"], 1, 10.0, "id", RequestObserver()))
    assert [span.name for span in exported.get_finished_spans() if span.name == "cache"] == []
