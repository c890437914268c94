"""The spans and the stage of the operator's own functions."""

import pytest

from app.errors import FunctionError
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.settings import Settings
from app.stages.combiner import Combiner
from app.telemetry.metric_table import STAGE_MS
from tests.support.fakes import FakeDecoder, FakeMember, service_of

OWN = "tests.support.own_functions"


async def test_each_call_is_a_span(tiny_set, told, exported, request_span):
    names = {"preprocess": f"{OWN}:raises_on_many", "combine": f"{OWN}:vote"}
    settings = Settings(model_set=str(tiny_set), **names)
    members = {"sure": FakeMember(), "unsure": FakeMember()}
    service = service_of(settings, FakeDecoder(), members, Combiner(settings))
    await service.classify(ClassifyRequest([b"good"], 1, 10.0, "id", RequestObserver()))
    with pytest.raises(FunctionError):
        await service.classify(ClassifyRequest([b"good"] * 4, 1, 10.0, "id", RequestObserver()))
    finished = exported.get_finished_spans()
    spans = [span for span in finished if span.name == "function"]
    assert [span.attributes["tandem.stage"] for span in spans] == [*names, "preprocess"]
    assert [span.attributes["tandem.function"] for span in spans[:2]] == [*names.values()]
    assert all(span.parent.span_id == request_span.context.span_id for span in spans)
    assert [span.status.description for span in spans] == [None, None, "ValueError: too many"]
    assert {"preprocess", "combine"} <= {span.name for span in finished}
    assert ("preprocess", "none") in told.observed(STAGE_MS)
