"""The stages' own spans: the HTTP request, the Decoder, the members, the Gateway's clock."""

import threading

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, HTTPException
from opentelemetry import trace

from app.errors import DeadlineError
from app.graph.observer import RequestObserver
from app.http.api import ObservedRequests
from app.settings import Settings
from app.stages.classifier import Classifier
from app.stages.decoder import Decoder
from app.telemetry.spans import current_parent
from models import image_header
from tests.support.tiny_networks import picture


@pytest.fixture
def settings(tiny_set) -> Settings:
    return Settings(model_set=str(tiny_set), batch_sizes=(1, 2), compile_cache=None)


@pytest.fixture
async def client():
    api = FastAPI(telemetry={"tracing": False})
    api.add_middleware(ObservedRequests)

    @api.get("/things/{name}")
    async def thing(name: str) -> str:
        if name == "none":
            raise HTTPException(404)
        return name

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(api), base_url="http://tandem"
    ) as client:
        yield client


async def test_a_traced_request_is_named_and_the_client_told(client, exported, request_span):
    answer = await client.get("/things/one")
    assert answer.headers["x-trace-id"] == f"{request_span.context.trace_id:032x}"
    assert request_span.name == "GET /things/{name}"
    assert request_span.attributes["http.response.status_code"] == 200
    await client.get("/things/none")
    assert request_span.attributes["http.response.status_code"] == 404
    await client.get("/nothing")
    assert request_span.name == "GET"


async def test_a_request_that_is_not_traced_has_no_header(client, exported):
    answer = await client.get("/things/one")
    assert answer.status_code == 200
    assert "x-trace-id" not in answer.headers


async def test_each_image_is_decoded_in_a_span_of_its_own(settings, exported, request_span):
    png = picture("green", side=40)
    await Decoder(settings).decode([png, b"no image"])
    good, bad = exported.get_finished_spans()
    assert (good.name, bad.name) == ("decode", "decode")
    assert dict(good.attributes) == {
        "tandem.image": 0,
        "tandem.bytes": len(png),
        "tandem.format": "png",
        "tandem.width": 40,
        "tandem.height": 40,
    }
    assert good.status.description is None
    assert "image" in bad.status.description
    assert {s.parent.span_id for s in (good, bad)} == {request_span.context.span_id}


@pytest.mark.parametrize("file", [b"\xff\xd8\xff no header", picture("red")])
async def test_a_header_is_never_read_on_the_event_loop(
    settings, monkeypatch, exported, request_span, file
):
    """It may take a third of a second: of a 20 MB file crafted for it."""
    readers = []
    read = image_header.read_header

    def noting(data: bytes) -> object:
        readers.append(threading.current_thread())
        return read(data)

    decoder = Decoder(settings)  # it reads a picture of its own
    monkeypatch.setattr("app.stages.decoder.read_header", noting)
    monkeypatch.setattr("models.image.read_header", noting)
    await decoder.decode([file])
    assert readers
    assert threading.main_thread() not in readers
    assert exported.get_finished_spans()


async def test_a_member_records_every_images_wait_and_run(settings, exported, request_span):
    images = np.zeros((3, *images_shape(settings)), np.uint8)
    await Classifier(settings, "sure").classify(images, 10.0)
    spans = exported.get_finished_spans()
    spans = [span for span in spans if span.name != "batch"]
    assert [s.name for s in spans] == ["queue", "infer"] * 3
    assert [s.attributes["tandem.image"] for s in spans] == [0, 0, 1, 1, 2, 2]
    assert [s.attributes["tandem.batch_size"] for s in spans if s.name == "infer"] == [2, 2, 1]
    assert {s.attributes["tandem.member"] for s in spans} == {"sure"}


async def test_a_deadline_in_the_queue_is_told(settings, exported, request_span):
    images = np.zeros((1, *images_shape(settings)), np.uint8)
    with pytest.raises(DeadlineError):
        await Classifier(settings, "sure").classify(images, 1e-9)
    (span,) = exported.get_finished_spans()
    assert span.name == "queue"
    assert "DeadlineError: the deadline passed" in span.status.description


async def test_without_a_trace_nothing_is_recorded(settings, exported):
    await Decoder(settings).decode([picture("green"), b"no image"])
    await Classifier(settings, "sure").classify(
        np.zeros((1, *images_shape(settings)), np.uint8), 10.0
    )
    RequestObserver().stage_ended("read", 0.0)
    assert not exported.get_finished_spans()


def test_the_gateways_observer_records_its_own_stages(exported, request_span):
    observer = RequestObserver()
    observer.timed("decode", observer.elapsed_ms())
    observer.stage_ended("combine", observer.elapsed_ms())
    span = observer._stages["combine"]
    (recorded,) = exported.get_finished_spans()
    assert recorded.name == "combine"
    took_ms = (recorded.end_time - recorded.start_time) / 1e6
    assert took_ms == pytest.approx(span.end_ms - span.start_ms, abs=0.01)
    assert recorded.parent.span_id == request_span.context.span_id


def test_a_parent_is_where_the_code_runs(exported, request_span):
    assert current_parent() == request_span.get_span_context()
    with trace.get_tracer("serve").start_as_current_span("replica") as inner:
        assert current_parent() == inner.get_span_context()


def images_shape(settings: Settings) -> tuple[int, int, int]:
    from models.model_set import load_model_set

    size = load_model_set(settings.model_set).manifest.image.input_size
    return size, size, 3
