"""Ensemble.Classify in this process, in front of a gateway that the test scripts."""

import asyncio
import logging
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToDict

from app.access import Keys
from app.errors import REFUSED_HEADER, FunctionError, OverloadedError
from app.grpc.interface import GrpcInterface
from app.grpc.tandem_pb2 import ClassifyReply, ClassifyRequest
from app.telemetry.metric_table import REQUEST_MS, REQUESTS, STAGE_MS
from tests.support.fakes import FakeService
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.instruments import Instruments

ROUTE = "/tandem.v1.Ensemble/Classify"


async def classify(service: FakeService, *images: bytes, top_k: int | None = None, **metadata: Any):
    """Return the reply, and the context that has its status."""
    context = context_of(**metadata)
    request = ClassifyRequest(images=images, top_k=top_k)
    incoming = stream_of(request.SerializeToString())
    return await GrpcInterface(service).classify(incoming, context), context


def trailing(context) -> dict[str, str]:
    return dict(context.trailing_metadata())


async def test_every_image_has_its_answer_or_its_own_error(service):
    reply, context = await classify(service, b"image a", b"no", b"image b")
    first, second, third = reply.results
    assert first.classified.predictions[0].label == "image a"
    assert third.classified.members["a"].probability == 0.75
    assert second.WhichOneof("outcome") == "error"
    assert (second.error.code, second.error.request_id) == ("not_an_image", "r1")
    assert second.error.status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert reply.request_id == "r1"
    assert context.code() is None  # nobody but Serve says OK
    assert trailing(context) == {"request_id": "r1"}
    (asked,) = service.requests
    assert asked.files == [b"image a", b"no", b"image b"]
    assert (asked.top_k, asked.timeout_s, asked.lane) == (5, 10.0, "bulk")


async def test_the_answer_is_that_of_http(service: FakeService, client: httpx.AsyncClient):
    service.skipped = ["b"]
    files = [("files", ("0", b"image a")), ("files", ("1", b"no"))]
    form = await client.post("/v1/classify", files=files, headers={"x-request-id": "r1"})
    reply, _ = await classify(service, b"image a", b"no")
    told = MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    good, bad = told["results"]
    assert bad["error"].pop("status") == 3  # what HTTP says in its status line
    assert good["classified"].pop("missing_members") == {}  # which JSON leaves out
    assert [good["classified"], bad] == form.json()["results"]
    assert told["request_id"] == form.json()["request_id"]


@pytest.mark.parametrize("top_k", [0, -1, 11, 2**31 - 1])
async def test_a_top_k_out_of_range(service, top_k):
    reply, context = await classify(service, b"image", top_k=top_k)
    assert reply == ClassifyReply()
    assert context.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"top_k is {top_k};" in context.details()
    assert "ask for 1 to 10" in context.details()
    assert trailing(context)["error-code"] == "bad_parameter"
    assert service.requests == []


async def test_top_k_and_time_and_lane_are_handed_on(service):
    await classify(service, b"image", top_k=3, x_request_timeout_seconds="2.5", priority="u=6")
    (asked,) = service.requests
    assert (asked.top_k, asked.timeout_s, asked.lane) == (3, 2.5, "bulk")


async def test_the_answer_has_its_own_time(service):
    service.answer_within(4.0)
    await classify(service, b"image")
    await classify(service, b"image", x_request_timeout_seconds="2.5")
    whole, shortened = (asked.timeout_s for asked in service.requests)
    assert 4.0 <= whole < 9  # from when the message was read
    assert shortened == 2.5


@pytest.mark.parametrize(
    ("images", "code", "says"),
    [
        ([], "bad_parameter", "no image"),
        ([b"image"] * 4, "too_many_files", "4 images, the limit is 3"),
        ([b"image", bytes(996)], "too_many_bytes", "1001 bytes, the limit is 1000"),
    ],
)
async def test_limits(service, images, code, says):
    _, context = await classify(service, *images)
    assert context.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert says in context.details()
    assert trailing(context)["error-code"] == code
    assert service.requests == []


async def test_a_full_gateway_says_when_to_come_back(service):
    service.admission.is_full = True
    _, context = await classify(service, b"image")
    assert context.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailing(context) == {
        "request_id": "r1",
        "error-code": "overloaded",
        "grpc-retry-pushback-ms": "1000",
    }


async def test_what_haproxy_refused_is_counted(service):
    refused: dict[str, Any] = {REFUSED_HEADER: "30"}
    await classify(service, b"image", **refused)
    assert service.admission.num_refused_before == 30


async def test_a_bug_is_logged_and_not_shown(service, caplog):
    service.raises = ValueError("secret")
    _, context = await classify(service, b"image")
    assert context.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in context.details()
    assert "request r1 failed" in caplog.text


async def test_calls_are_counted_as_http_is(service, told: Instruments):
    await classify(service, b"image")
    await classify(service, b"image", top_k=99)
    service.raises = OverloadedError("full")
    await classify(service, b"image")
    service.raises = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await classify(service, b"image")
    statuses = ("200", "422", "429", "499")
    assert told.of(REQUESTS) == {(ROUTE, status, "classify"): 1 for status in statuses}
    assert set(told.observed(REQUEST_MS)) == {("200",), ("422",), ("429",), ("499",)}
    assert told.observed(STAGE_MS) == {("encode", "none"): 1}


KEY = "k" * 32


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({}, grpc.StatusCode.UNAUTHENTICATED),
        ({"authorization": f"Bearer {KEY[:-1]}"}, grpc.StatusCode.UNAUTHENTICATED),
        ({"authorization": "Bearer \u2713\udcff"}, grpc.StatusCode.UNAUTHENTICATED),
        ({"authorization": KEY}, grpc.StatusCode.UNAUTHENTICATED),
        ({"authorization": f"Bearer {KEY}"}, None),
    ],
)
async def test_keys_are_asked_for_as_over_http(service, given, code):
    service.keys = Keys([KEY])
    _, context = await classify(service, b"image", **given)
    assert context.code() is code
    assert len(service.requests) == (code is None)
    assert KEY not in str(context.details())


async def test_bytes_that_have_no_room(service):
    with service.byte_budget.share() as others:
        others.grow(service.byte_budget.limit)
        _, context = await classify(service, b"image")
    assert context.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await classify(service, b"image"))[1].code() is None
    assert service.byte_budget.num_held == 0


async def test_metadata_that_is_no_text_is_nobodys(service):
    _, context = await classify(service, b"image", something_bin=b"\xff")
    assert context.code() is None


async def test_a_message_that_was_received_before_anybody_was_asked(service):
    """As with the generated function in grpc_servicer_functions."""
    reply = await GrpcInterface(service).classify(
        ClassifyRequest(images=[b"image"], top_k=3), context_of()
    )
    assert reply.results[0].classified.predictions[0].label == "image"
    assert service.requests[0].top_k == 3


@pytest.mark.parametrize(
    ("sent", "says"),
    [([], "the call has no message"), ([b"\xff\xff no message"], "13 bytes are no tandem.v1")],
)
async def test_what_is_no_request(service, sent, says):
    context = context_of()
    reply = await GrpcInterface(service).classify(stream_of(*sent), context)
    assert reply == ClassifyReply()
    assert (context.code(), service.requests) == (grpc.StatusCode.INVALID_ARGUMENT, [])
    assert says in context.details()
    assert trailing(context)["error-code"] == "bad_parameter"


@pytest.mark.parametrize("error", [FunctionError("combine failed"), ZeroDivisionError("a bug")])
async def test_what_is_ours_to_mend_is_logged_with_the_calls_id(service, caplog, error):
    service.raises = error
    with caplog.at_level(logging.ERROR, "ray.serve"):
        await classify(service, b"image", request_id="r1")
    (record,) = caplog.records
    assert record.message.startswith("request r1")
    assert record.request_id == "r1"
