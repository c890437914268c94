"""A call over gRPC: its message's fields, and what is asked before the message is received."""

import gc
import pickle
import tracemalloc
from importlib.metadata import version

import grpc
import pytest

from app.access import Keys
from app.environment import MIB
from app.errors import BadParameterError
from app.grpc.call import MAX_FIELDS, Message, parsed
from app.grpc.interface import GrpcInterface
from app.grpc.open_inference import REQUEST
from app.grpc.open_inference_pb2 import ModelInferRequest
from app.grpc.tandem_pb2 import ClassifyReply, ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from app.settings import Settings
from tests.support.cases import cases
from tests.support.fakes import FakeService
from tests.support.grpc_replica import grpc_replica
from tests.support.slow_relay import slow_relay

INPUTS, IMAGES, CONTENTS, OF_BYTES = b"\x2a", b"\x0a", b"\x2a", b"\x42"
KEY = "k" * 32
GENERATED = "app.grpc.tandem_pb2_grpc.add_EnsembleServicer_to_server"
# Ray 2.59 does not route what grpcio's newer generated code registers; tandem serve names ours.
SINCE_2_60 = pytest.mark.skipif(version("ray").startswith("2.59."), reason="not with Ray 2.59")
LARGE = bytes(2 * MIB)  # no image, but that is found out later
HELD_BACK = 100_000  # of such a message so much is sent
CODE = grpc.StatusCode
PATIENCE_S = 20.0  # of a client that is told nothing


def of_length(tag: bytes, content: bytes) -> bytes:
    length, digits = len(content), bytearray()
    while length > 0x7F:
        digits.append(length & 0x7F | 0x80)
        length >>= 7
    return tag + bytes([*digits, length]) + content


@cases(
    "kind, message",
    (ModelInferRequest, INPUTS + b"\0"),
    (ClassifyRequest, IMAGES + b"\0"),
    (ClassifyRequest, b"\x58\1"),  # an unknown number
)
def test_fields_are_counted_before_they_take_memory(kind, message):
    parsed(message * 1000, kind)
    with pytest.raises(BadParameterError, match=f"over {MAX_FIELDS} fields, which is the limit"):
        parsed(message * (MAX_FIELDS + 1), kind)


def test_fields_of_messages_in_it_count_and_packed_numbers_too():
    tensor = of_length(INPUTS, of_length(CONTENTS, of_length(OF_BYTES, b"") * (MAX_FIELDS // 2)))
    parsed(tensor, ModelInferRequest)
    with pytest.raises(BadParameterError, match="fields, which is the limit"):
        parsed(tensor * 3, ModelInferRequest)
    tensor = ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1] * 1000)
    tensor.parameters["p"].int64_param = 1
    message = ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[b"x" * 10**6])
    assert parsed(message.SerializeToString(), ModelInferRequest) == message
    message.inputs[0].shape.extend([1] * MAX_FIELDS)
    with pytest.raises(BadParameterError, match="fields, which is the limit"):
        parsed(message.SerializeToString(), ModelInferRequest)


def test_typed_contents_stay_packed_and_count_as_one():
    tensor = ModelInferRequest.InferInputTensor()
    tensor.contents.uint_contents.extend([5, 300] * MAX_FIELDS)
    message = ModelInferRequest(inputs=[tensor]).SerializeToString()
    (packed,) = parsed(message, REQUEST).inputs[0].contents.uint_contents
    assert packed == b"\5\xac\2" * MAX_FIELDS


@pytest.mark.parametrize("cut", [b"\x2a", b"\x2a\xff", b"\x2a\x05ab", b"\x80", b"\xff" * 20])
def test_a_message_that_is_cut_does_not_parse(cut):
    with pytest.raises(BadParameterError, match=r"are no inference\.ModelInferRequest"):
        parsed(cut, ModelInferRequest)


@pytest.fixture
def service() -> FakeService:
    return FakeService(Settings(max_body_bytes=4 * MIB, max_files=3))


async def classify(port: int, image: bytes) -> tuple[ClassifyReply, dict]:
    """Return the reply and the trailing metadata, or raise grpc.aio.AioRpcError."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = EnsembleStub(channel).Classify(ClassifyRequest(images=[image]), timeout=PATIENCE_S)
        return await call, dict(await call.trailing_metadata())


async def refused_half_way(service: FakeService) -> tuple[grpc.StatusCode, dict[str, str]]:
    """Send a part of a message and then next to nothing; return how the call ended."""
    async with grpc_replica(GrpcInterface(service)) as port, slow_relay(port, HELD_BACK) as relay:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await classify(relay.port, LARGE)
    assert service.requests == []
    return caught.value.code(), dict(caught.value.trailing_metadata())


@pytest.mark.parametrize("add_servicer", [None, pytest.param(GENERATED, marks=SINCE_2_60)])
async def test_an_answer(service, add_servicer):
    server = grpc_replica(GrpcInterface(service), *([add_servicer] if add_servicer else []))
    async with server as port:
        reply, trailing = await classify(port, b"image")
        large, _ = await classify(port, LARGE)
    assert reply.results[0].classified.predictions[0].label == "image"
    assert trailing["request_id"] == reply.request_id == "r1"
    assert large.results[0].error.code == "not_an_image"
    assert [len(asked.files[0]) for asked in service.requests] == [5, len(LARGE)]


async def test_what_is_refused_before_the_message_is_there(service):
    service.admission.is_full = True
    code, trailing = await refused_half_way(service)
    assert (code, trailing["grpc-retry-pushback-ms"]) == (CODE.RESOURCE_EXHAUSTED, "1000")
    service.keys = Keys([KEY])
    code, trailing = await refused_half_way(service)
    assert (code, trailing["error-code"]) == (CODE.UNAUTHENTICATED, "unauthorized")


async def test_a_message_that_does_not_come_is_not_waited_for_beyond_the_requests_time():
    service = FakeService(Settings(max_body_bytes=4 * MIB, request_timeout_s=0.2))
    code, trailing = await refused_half_way(service)
    assert (code, trailing["error-code"]) == (CODE.DEADLINE_EXCEEDED, "slow_body")
    assert service.admission.uploads.num == 0


async def test_a_client_that_goes_leaves_nothing_behind(service, told):
    async with (
        grpc_replica(GrpcInterface(service)) as port,
        slow_relay(port, HELD_BACK) as relay,
        grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}") as channel,
    ):
        request = ClassifyRequest(images=[LARGE])
        with pytest.raises(grpc.aio.AioRpcError):
            await EnsembleStub(channel).Classify(request, timeout=0.3)
        reply, _ = await classify(port, b"image")
    assert reply.results[0].HasField("classified")
    assert (service.admission.uploads.num, service.byte_budget.num_held) == (0, 0)
    assert len(service.requests) == 1


async def test_nothing_keeps_a_message_that_was_answered(service):
    """Counted is what Python objects hold, with cycles of references left where they are."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    held = []
    try:
        async with grpc_replica(GrpcInterface(service)) as port:
            for _ in range(5):
                await classify(port, LARGE)
                service.requests.clear()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held[-1] - held[0] < len(LARGE) / 2


def test_a_message_is_taken_once_and_travels():
    message = pickle.loads(pickle.dumps(Message(b"bytes")))  # from Serve's own proxy
    assert (message.take(), message.take()) == (b"bytes", b"")


async def test_a_message_that_is_too_long_is_told_so(service):
    async with grpc_replica(GrpcInterface(service)) as port:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await classify(port, bytes(5 * MIB))
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    assert "the limit is 4194304; send smaller ones" in caught.value.details()
