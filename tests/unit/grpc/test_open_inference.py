"""The Open Inference Protocol over gRPC, with the real service in front of members of the test."""

import asyncio
import base64
from typing import Any

import grpc
import numpy as np
import pytest

from app.access import Keys
from app.errors import NotReadyError
from app.grpc import open_inference_pb2 as messages
from app.grpc.call import OPEN_INFERENCE_METHODS
from app.grpc.open_inference import OpenInferenceInterface, OpenInferenceMethods
from app.oip.inference import Inference
from app.telemetry.metric_table import REQUEST_MS, REQUESTS
from tests.support.grpc_contexts import context_of, stalled_stream, stream_of
from tests.support.instruments import Instruments
from tests.support.open_inference import FIRST, LABELS, MEAN, SIZE, VERSION, Graph, elements

IMAGE = b"good image"
Request = messages.ModelInferRequest
Parameter = messages.InferParameter
CODE = grpc.StatusCode


class Client:
    """Calls methods in this process, as Serve does."""

    def __init__(self, graph: Graph) -> None:
        self._methods = OpenInferenceMethods()
        self._methods._open_inference = OpenInferenceInterface(Inference(graph.service))

    async def call(self, method: str, request: Any = None, **metadata: str) -> tuple[Any, Any]:
        """Return the reply, and the context that has its status."""
        context = context_of(**metadata)
        data = b"" if request is None else request.SerializeToString()
        answering = getattr(self._methods, method)
        return await answering(incoming=stream_of(data), grpc_context=context), context

    async def infer(self, request: Request, **metadata: str) -> tuple[Any, Any]:
        return await self.call("ModelInfer", request, **metadata)


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph) -> Client:
    return Client(graph)


def tensor(name: str = "image", datatype: str = "BYTES", shape: Any = (1,), **contents: Any) -> Any:
    given = messages.InferTensorContents(**contents) if contents else None
    return Request.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=given)


def output(name: str, **parameters: int) -> Any:
    given = {key: Parameter(int64_param=value) for key, value in parameters.items()}
    return Request.InferRequestedOutputTensor(name=name, parameters=given)


def asked(*inputs: Any, raw: Any = (), model: str = "imagenette", **fields: Any) -> Request:
    return Request(model_name=model, inputs=inputs, raw_input_contents=raw, **fields)


async def test_raw_contents_are_answered_in_raw_contents(client):
    request = asked(tensor(shape=(2, 1)), raw=[elements(IMAGE, IMAGE)], id="mine")
    reply, context = await client.infer(request)
    assert context.code() is None
    assert (reply.model_name, reply.model_version, reply.id) == ("imagenette", VERSION, "mine")
    probabilities, label = reply.outputs
    assert (probabilities.datatype, probabilities.shape) == ("FP32", [2, 10])
    assert (label.datatype, label.shape) == ("BYTES", [2])
    rows = np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(2, 10)
    assert rows == pytest.approx(np.stack([MEAN, MEAN]), abs=1e-7)
    assert reply.raw_output_contents[1] == elements(*[LABELS[1].encode()] * 2)


async def test_typed_contents_are_answered_in_typed_contents(client):
    reply, _ = await client.infer(asked(tensor(bytes_contents=[IMAGE])))
    probabilities, label = reply.outputs
    assert list(probabilities.contents.fp32_contents) == pytest.approx(MEAN, abs=1e-7)
    assert list(label.contents.bytes_contents) == [LABELS[1].encode()]
    assert not reply.raw_output_contents


@pytest.mark.parametrize("is_raw", [False, True])
async def test_mlservers_base64(client, is_raw):
    text = base64.b64encode(IMAGE)
    wrong = [b"Z29v!A==", IMAGE, "\N{LATIN SMALL LETTER A WITH DIAERESIS}".encode()]
    for part in [text, *wrong]:
        contents: dict[str, Any] = {} if is_raw else {"bytes_contents": [text, part]}
        one = tensor(shape=(2,), **contents)
        one.parameters["content_type"].string_param = "base64"
        raw = [elements(text, part)] if is_raw else []
        reply, context = await client.infer(asked(one, raw=raw))
        if part == text:
            assert context.code() is None, context.details()
            assert [*reply.outputs[1].shape] == [2]
        else:
            assert context.code() is CODE.INVALID_ARGUMENT
            assert f"element 1, {part!r}, is no base64" in context.details()


@pytest.mark.parametrize("is_raw", [False, True])
async def test_pixels_are_not_decoded(graph, client, is_raw):
    graph.decoder.raises = AssertionError("the Decoder was asked")
    pixels = bytes([7]) * (3 * SIZE * SIZE)
    contents = {} if is_raw else {"uint_contents": pixels}
    one = tensor("pixels", "UINT8", (1, SIZE, SIZE, 3), **contents)
    reply, context = await client.infer(asked(one, raw=[pixels] if is_raw else []))
    assert context.code() is None, context.details()
    assert graph.members["resnet50"].seen == [[7]]
    assert reply.outputs[1].name == "label"


async def test_classification_parameters_and_a_member_alone(graph, client):
    request = asked(
        tensor(bytes_contents=[IMAGE]),
        model="imagenette.resnet50",
        model_version="1",
        outputs=[output("probabilities", classification=2)],
        parameters={"priority": Parameter(uint64_param=6), "timeout": Parameter(int64_param=10**6)},
    )
    reply, _ = await client.infer(request)
    (found,) = reply.outputs
    assert (found.datatype, found.shape) == ("BYTES", [1, 2])
    expected = [f"0.600000:1:{LABELS[1]}".encode(), f"0.200000:4:{LABELS[4]}".encode()]
    assert list(found.contents.bytes_contents) == expected
    assert graph.members["resnet50"].lanes == ["bulk"]
    assert graph.members["resnet50"].asked[0][1] <= 1.0
    assert graph.members["densenet169"].seen == []


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        (asked(tensor()), "INVALID_ARGUMENT", "0 values"),
        (asked(), "INVALID_ARGUMENT", "has 0 inputs"),
        (asked(*[tensor()] * 17), "INVALID_ARGUMENT", "the limit is 16"),
        (asked(tensor(), raw=[b"", b""]), "INVALID_ARGUMENT", "2 entries for 1 inputs"),
        (
            asked(tensor(bytes_contents=[IMAGE]), raw=[elements(IMAGE)]),
            "INVALID_ARGUMENT",
            "has contents and raw_input_contents",
        ),
        (asked(tensor(uint_contents=[1])), "INVALID_ARGUMENT", "BYTES goes into bytes_contents"),
        (asked(tensor(datatype="FP16", shape=(0,))), "INVALID_ARGUMENT", "raw_input_contents only"),
        (asked(tensor(shape=(-1,)), raw=[b""]), "INVALID_ARGUMENT", "sizes are whole numbers"),
        (asked(tensor(shape=(2**31,)), raw=[b""]), "INVALID_ARGUMENT", "more elements than"),
        (asked(tensor(shape=(2**62,) * 5), raw=[b""]), "INVALID_ARGUMENT", "more elements than"),
        (asked(tensor(), raw=[b"\xff\xff\xff\xff"]), "INVALID_ARGUMENT", "4294967295 bytes"),
        (
            asked(tensor("pixels", "UINT8", (1, SIZE, SIZE, 3), uint_contents=[256])),
            "INVALID_ARGUMENT",
            "1 values",
        ),
        (
            asked(tensor(), tensor("pixels", "UINT8"), raw=[elements(IMAGE), b"1"]),
            "INVALID_ARGUMENT",
            "has 2 inputs",
        ),
        (asked(tensor(shape=(5,), bytes_contents=[IMAGE] * 5)), "INVALID_ARGUMENT", "limit is 4"),
        (
            asked(tensor(bytes_contents=[IMAGE]), outputs=[output("x")]),
            "INVALID_ARGUMENT",
            "no output 'x'",
        ),
        (
            asked(tensor(bytes_contents=[IMAGE]), id="x" * 2000),
            "INVALID_ARGUMENT",
            "up to 1024 characters",
        ),
        (asked(tensor(bytes_contents=[IMAGE]), model="x"), "NOT_FOUND", "there are imagenette"),
        (
            asked(tensor(bytes_contents=[IMAGE]), model_version="2"),
            "NOT_FOUND",
            f"has version {VERSION}, which 1",
        ),
        (
            asked(tensor(shape=(2,), bytes_contents=[IMAGE, b"no"])),
            "INVALID_ARGUMENT",
            "image 1 of 2",
        ),
    ],
)
async def test_bad_requests(client, request_, code, says):
    reply, context = await client.infer(request_)
    assert context.code() is CODE[code]
    assert says in context.details()
    assert reply == messages.ModelInferResponse()
    good, _ = await client.infer(asked(tensor(bytes_contents=[IMAGE])))
    assert len(good.outputs) == 2


async def test_a_message_that_is_none(client):
    context = context_of()
    await client._methods._open_inference.call("ModelInfer", stream_of(b"\xff\xff"), context)
    assert context.code() is CODE.INVALID_ARGUMENT
    assert "inference.ModelInferRequest" in context.details()
    assert "app/grpc/open_inference.proto" in context.details()


async def test_server_and_models_describe_themselves(client):
    server, _ = await client.call("ServerMetadata")
    assert server.name == "tandem"
    assert "statistics" in server.extensions
    request = messages.ModelMetadataRequest(name="imagenette", version="1")
    model, _ = await client.call("ModelMetadata", request)
    assert [t.name for t in model.inputs] == ["image", "pixels"]
    assert [list(t.shape) for t in model.outputs] == [[-1, 10], [-1]]
    index, _ = await client.call("RepositoryIndex")
    names = ["imagenette", "imagenette.resnet50", "imagenette.densenet169"]
    assert [model.name for model in index.models] == names
    _, context = await client.call("ModelMetadata", messages.ModelMetadataRequest(name="x"))
    assert context.code() is CODE.NOT_FOUND


async def test_live_and_ready(graph, client):
    request = messages.ModelReadyRequest(name="imagenette")
    graph.members["resnet50"].raises = NotReadyError("gone")
    assert (await client.call("ServerLive"))[0].live
    assert not (await client.call("ServerReady"))[0].ready
    assert not (await client.call("ModelReady", request))[0].ready
    graph.members["resnet50"].raises = None
    assert (await client.call("ServerReady"))[0].ready
    assert (await client.call("ModelReady", request))[0].ready
    _, context = await client.call("ModelReady", messages.ModelReadyRequest(name="x"))
    assert context.code() is CODE.NOT_FOUND


@pytest.mark.parametrize("method", ["ServerLive", "ServerReady", "ServerMetadata"])
async def test_where_nothing_is_to_be_read_nothing_is_waited_for(client, method):
    context = context_of(x_grpc_message_prefix="0000100000")
    async with asyncio.timeout(10):
        await getattr(client._methods, method)(stalled_stream(), context)
    assert context.code() is None


async def test_a_question_that_announces_a_mebibyte_is_refused_at_once(client):
    context = context_of(x_grpc_message_prefix="0000100000")
    async with asyncio.timeout(10):
        await client._methods._open_inference.call("ModelReady", stalled_stream(), context)
    assert context.code() is CODE.INVALID_ARGUMENT
    assert "the limit of this method is 16384" in context.details()


async def test_statistics(client):
    await client.infer(asked(tensor(shape=(2,), bytes_contents=[IMAGE] * 2)))
    await client.infer(asked(tensor(bytes_contents=[b"no"])))
    request = messages.ModelStatisticsRequest(name="imagenette")
    (stats,) = (await client.call("ModelStatistics", request))[0].model_stats
    assert (stats.inference_count, stats.execution_count) == (2, 1)
    assert (stats.inference_stats.success.count, stats.inference_stats.fail.count) == (1, 1)
    every, _ = await client.call("ModelStatistics")
    assert len(every.model_stats) == 3


async def test_keys_are_asked_for_and_probes_need_none(graph):
    graph.service.keys = Keys(["k" * 32])
    client = Client(graph)
    for method in OPEN_INFERENCE_METHODS:
        _, context = await client.call(method)
        is_open = method in ("ServerLive", "ServerReady")
        assert context.code() is (None if is_open else CODE.UNAUTHENTICATED), method
    bearer = f"Bearer {'k' * 32}"
    request = asked(tensor(bytes_contents=[IMAGE]))
    reply, context = await client.infer(request, authorization=bearer)
    assert context.code() is None
    assert list(reply.outputs[0].contents.fp32_contents) != FIRST


async def test_calls_are_counted_by_their_method(client, told: Instruments):
    await client.infer(asked(tensor(bytes_contents=[IMAGE])))
    await client.call("ServerLive")
    service = "/inference.GRPCInferenceService"
    expected = {
        (f"{service}/ModelInfer", "200", "classify"): 1,
        (f"{service}/ServerLive", "200", "other"): 1,
    }
    assert told.of(REQUESTS) == expected
    assert told.observed(REQUEST_MS) == {("200",): 1}


def test_every_method_of_the_service_is_the_ingress_own():
    for method in OPEN_INFERENCE_METHODS:
        assert callable(getattr(OpenInferenceMethods, method))
