"""The Open Inference Protocol over gRPC, with the real service in front of members of the test."""

import asyncio
import base64
import subprocess
import sys
import time
from typing import Any

import grpc
import numpy as np
import pytest

from app.access import Keys
from app.errors import NotReadyError
from app.grpc import open_inference_pb2 as messages
from app.grpc.call import OPEN_INFERENCE_METHODS, is_loopback_peer
from app.grpc.open_inference import CONTENTS, REQUEST, OpenInferenceInterface, OpenInferenceMethods
from app.oip.inference import Inference
from app.telemetry.metric_table import REQUEST_MS, REQUESTS
from tests.support.cases import cases
from tests.support.grpc_contexts import context_of, stalled_stream, stream_of
from tests.support.open_inference import (
    FIRST,
    IMAGE,
    LABELS,
    MEAN,
    SIZE,
    VERSION,
    Graph,
    drawn,
    elements,
)
from tests.support.shared_regions import Memory, in_region

pytestmark = pytest.mark.usefixtures("behind_haproxy")

Request = messages.ModelInferRequest
Parameter = messages.InferParameter
CODE = grpc.StatusCode
INVALID = CODE.INVALID_ARGUMENT
HERE, ELSEWHERE = "ipv4:127.0.0.1:5", "ipv4:10.0.0.7:5"
FILE = elements(IMAGE)
SYSTEM = ("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister")
TEXT = base64.b64encode(IMAGE)


class Client:
    """Calls methods in this process, as Serve does, from ``peer``."""

    def __init__(self, graph: Graph, memory: Memory | None = None, peer: str = HERE) -> None:
        regions = memory.regions if memory else None
        self._methods, self._peer = OpenInferenceMethods(), peer
        self._methods._open_inference = OpenInferenceInterface(Inference(graph.service, regions))

    async def call(self, method, request=None, metadata=None, **fields):
        """Return the reply, and the context that has its status."""
        request = request or getattr(messages, f"{method}Request")(**fields)
        context = context_of(peer=self._peer, **(metadata or {}))
        stream = stream_of(request.SerializeToString())
        return await getattr(self._methods, method)(incoming=stream, grpc_context=context), context

    async def infer(self, request: Request, **metadata: str) -> tuple[Any, Any]:
        return await self.call("ModelInfer", request, metadata)


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph) -> Client:
    return Client(graph)


@pytest.fixture
def memory(tmp_path) -> Memory:
    return Memory(tmp_path)


@pytest.fixture
def shared(graph, memory) -> Client:
    """A client that has shared memory."""
    return Client(graph, memory)


def given(parameters: dict[str, Any]) -> dict[str, Any]:
    kinds = {int: "int64_param", str: "string_param", bool: "bool_param"}
    return {name: Parameter(**{kinds[type(value)]: value}) for name, value in parameters.items()}


def tensor(name="image", datatype="BYTES", shape=(1,), parameters=None, **contents):
    filled = messages.InferTensorContents(**contents) if contents else None
    tags = {"name": name, "datatype": datatype, "shape": shape}
    return Request.InferInputTensor(**tags, contents=filled, parameters=given(parameters or {}))


def images(*files: bytes) -> Any:
    return tensor(shape=(len(files),), bytes_contents=files)


def placed(byte_size: int, region: str = "r", offset: int | None = None, **contents: Any) -> Any:
    """Return the image as a tensor in a region."""
    return tensor(parameters=in_region(byte_size, region, offset), **contents)


def output(name: str, parameters: dict[str, Any] | None = None) -> Any:
    return Request.InferRequestedOutputTensor(name=name, parameters=given(parameters or {}))


GOOD = images(IMAGE)
LABEL = elements(LABELS[1].encode())


def asked(*inputs: Any, raw: Any = (), model: str = "imagenette", **fields: Any) -> Request:
    return Request(model_name=model, inputs=inputs, raw_input_contents=raw, **fields)


async def test_contents_are_answered_as_they_came_raw_or_typed(client):
    request = asked(tensor(shape=(2, 1)), raw=[elements(IMAGE, IMAGE)], id="mine")
    reply, context = await client.infer(request)
    assert context.code() is None
    assert (reply.model_name, reply.model_version, reply.id) == ("imagenette", VERSION, "mine")
    probabilities, label = reply.outputs
    assert (probabilities.datatype, probabilities.shape) == ("FP32", [2, 10])
    assert (label.datatype, label.shape) == ("BYTES", [2])
    rows = np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(2, 10)
    assert rows == pytest.approx(np.stack([MEAN, MEAN]), abs=1e-7)
    assert reply.raw_output_contents[1] == LABEL * 2
    reply, _ = await client.infer(asked(GOOD))
    probabilities, label = reply.outputs
    assert list(probabilities.contents.fp32_contents) == pytest.approx(MEAN, abs=1e-7)
    assert list(label.contents.bytes_contents) == [LABELS[1].encode()]
    assert not reply.raw_output_contents


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("part", [TEXT, b"Z29v!A==", IMAGE, b"\xc3\xa4"])
async def test_mlservers_base64(client, is_raw, part):
    contents: dict[str, Any] = {} if is_raw else {"bytes_contents": [TEXT, part]}
    two = tensor(shape=(2,), parameters={"content_type": "base64"}, **contents)
    reply, context = await client.infer(asked(two, raw=[elements(TEXT, part)] if is_raw else []))
    if part == TEXT:
        assert context.code() is None, context.details()
        assert [*reply.outputs[1].shape] == [2]
    else:
        assert context.code() is INVALID
        assert f"element 1, {part!r}, is no base64" in context.details()


@pytest.mark.parametrize("is_raw", [False, True])
async def test_pixels_are_not_decoded(graph, client, is_raw):
    graph.decoder.raises = AssertionError("the Decoder was asked")
    data = drawn().tobytes()
    contents: dict[str, Any] = {} if is_raw else {"uint_contents": data}
    pixels = tensor("pixels", "UINT8", drawn().shape, **contents)
    reply, context = await client.infer(asked(pixels, raw=[data] if is_raw else []))
    assert context.code() is None, context.details()
    assert graph.members["resnet50"].seen == [[7]]
    assert reply.outputs[1].name == "label"


async def test_classification_parameters_and_a_member_alone(graph, client):
    outputs = [output("probabilities", {"classification": 2})]
    more = {"priority": Parameter(uint64_param=6), "timeout": Parameter(int64_param=10**6)}
    named = {"model": "imagenette.resnet50", "model_version": "1"}
    reply, _ = await client.infer(asked(GOOD, **named, outputs=outputs, parameters=more))
    (found,) = reply.outputs
    assert (found.datatype, found.shape) == ("BYTES", [1, 2])
    expected = [f"0.600000:1:{LABELS[1]}".encode(), f"0.200000:4:{LABELS[4]}".encode()]
    assert list(found.contents.bytes_contents) == expected
    assert graph.members["resnet50"].lanes == ["bulk"]
    assert graph.members["resnet50"].asked[0][1] <= 1.0
    assert graph.members["densenet169"].seen == []


PIXELS = tensor("pixels", "UINT8", (1, SIZE, SIZE, 3), uint_contents=[256])
REGION, REGION_SIZE = "shared_memory_region", "shared_memory_byte_size"
IN_R = output("probabilities", in_region(39, "r"))


@cases(
    "request_, code, says",
    (asked(tensor()), INVALID, "0 values"),
    (asked(*[tensor()] * 17), INVALID, "the limit is 16"),
    (asked(tensor(), raw=[b"", b""]), INVALID, "2 entries for 1 inputs"),
    (asked(GOOD, raw=[FILE]), INVALID, "has contents and raw_input_contents"),
    (asked(tensor(uint_contents=[1])), INVALID, "BYTES goes into bytes_contents"),
    (asked(tensor(datatype="FP16", shape=(0,))), INVALID, "raw_input_contents only"),
    (asked(tensor(shape=(-1,)), raw=[b""]), INVALID, "sizes are whole numbers"),
    (asked(tensor(shape=(2**62,) * 5), raw=[b""]), INVALID, "more elements than"),
    (asked(PIXELS), INVALID, "2 bytes of packed values"),
    (asked(GOOD, outputs=[output("x")]), INVALID, "no output 'x'"),
    (asked(GOOD, id="x" * 2000), INVALID, "up to 1024 characters"),
    (asked(GOOD, model="x"), CODE.NOT_FOUND, "there are imagenette"),
    (asked(GOOD, model_version="2"), CODE.NOT_FOUND, f"has version {VERSION}, which 0 and 1"),
    (asked(images(IMAGE, b"no")), INVALID, "image 1 of 2"),
    # What no region fits.
    (asked(placed(9, "x")), CODE.NOT_FOUND, "'x' is not registered"),
    (asked(tensor(parameters={REGION: "r"})), INVALID, f"{REGION_SIZE} is None"),
    (asked(placed(len(FILE)), raw=[FILE]), INVALID, "has 1 entries for 0 inputs"),
    (asked(placed(9, bytes_contents=[IMAGE])), INVALID, "has data and a region"),
    (asked(placed(len(FILE)), outputs=[IN_R]), INVALID, "40 bytes, and 39 of shared memory"),
)
async def test_bad_requests(shared, memory, request_, code, says):
    memory.region(FILE)
    reply, context = await shared.infer(request_)
    assert context.code() is code
    assert says in context.details()
    assert reply == messages.ModelInferResponse()
    for good in (asked(GOOD), asked(placed(len(FILE)))):
        assert len((await shared.infer(good))[0].outputs) == 2


NUM_IMAGES = 160
LONG = NUM_IMAGES * SIZE * SIZE * 3  # values of two bytes each, so 15.7 MB


async def long_tensors(datatype: str, shape: list[int]) -> tuple[float, str]:
    """Send four at a time; return for how long the event loop stopped at most in s, and the end."""
    settings = {"max_body_bytes": 2 * LONG, "max_files": NUM_IMAGES}
    own = OpenInferenceInterface(Inference(Graph(**settings).service))
    contents = {CONTENTS[datatype]: [b"\xac\1" * (LONG - 1) + b"\xac\2"]}  # 172, and 300
    tensor = {"name": "pixels", "datatype": datatype, "shape": shape, "contents": contents}
    message = REQUEST(model_name="imagenette", inputs=[tensor]).SerializeToString()
    contexts = [context_of() for _ in range(4)]
    calls = (own.call("ModelInfer", stream_of(message), each) for each in contexts)
    answered, longest = asyncio.gather(*calls), 0.0
    while not answered.done():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - before)
    return longest, contexts[0].details()


LONG_TENSORS = (
    ("INT64", [LONG], "has datatype INT64; it is UINT8"),
    ("UINT8", [LONG], f"has shape [{LONG}]"),
    ("UINT8", [1, SIZE, SIZE, 3], f"has {2 * LONG} bytes of packed values"),
    ("UINT8", [NUM_IMAGES, SIZE, SIZE, 3], "whole numbers from 0 to 255"),
)


@cases("datatype, shape, says", *LONG_TENSORS)
async def test_long_typed_tensors_do_not_stop_the_event_loop(datatype, shape, says):
    """Measured: 50 ms at most; 1.7 to 5.9 s with every value as a number of Python's."""
    longest, said = await long_tensors(datatype, shape)
    assert says in said
    assert longest < 0.8


@pytest.mark.slow  # a child; the counts of bytes are in tests/unit/oip/test_tensors.py
def test_long_typed_tensors_take_little_more_memory_than_their_messages():
    """Measured: 120 MB; 440 to 560 MB with every value as a number of Python's."""
    program = (
        "import asyncio, resource, tests.unit.grpc.test_open_inference as own\n"
        "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = most()\n"
        "for datatype, shape, _ in own.LONG_TENSORS:\n"
        "    asyncio.run(own.long_tensors(datatype, shape))\n"
        "print((most() - before) / 1024)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert float(ran.stdout) < 300  # MiB


async def test_a_message_that_is_none(client):
    context = context_of()
    await client._methods._open_inference.call("ModelInfer", stream_of(b"\xff\xff"), context)
    assert context.code() is INVALID
    assert "inference.ModelInferRequest" in context.details()
    assert "app/grpc/open_inference.proto" in context.details()


async def test_server_and_models_describe_themselves(client):
    server, _ = await client.call("ServerMetadata")
    assert server.name == "tandem"
    assert "statistics" in server.extensions
    model, _ = await client.call("ModelMetadata", name="imagenette", version="1")
    assert [t.name for t in model.inputs] == ["image", "pixels"]
    assert [list(t.shape) for t in model.outputs] == [[-1, 10], [-1]]
    index, _ = await client.call("RepositoryIndex")
    names = ["imagenette", "imagenette.resnet50", "imagenette.densenet169"]
    assert [model.name for model in index.models] == names
    config = (await client.call("ModelConfig", name="imagenette", version="1"))[0].config
    assert (config.name, config.max_batch_size) == ("imagenette", 4)
    assert [(t.data_type, t.dims, t.optional) for t in config.input] == [
        (messages.TYPE_STRING, [1], True),
        (messages.TYPE_UINT8, [128, 128, 3], True),
    ]
    assert [(t.data_type, t.dims) for t in config.output] == [
        (messages.TYPE_FP32, [10]),
        (messages.TYPE_STRING, [1]),
    ]
    assert config.version_policy.latest.num_versions == 1
    for method in ("ModelMetadata", "ModelReady", "ModelConfig"):
        _, context = await client.call(method, name="x")
        assert context.code() is CODE.NOT_FOUND


async def test_live_and_ready(graph, client):
    for error in (NotReadyError("gone"), None):  # it comes back
        graph.members["resnet50"].raises = error
        assert (await client.call("ServerLive"))[0].live
        assert (await client.call("ServerReady"))[0].ready is (error is None)
        assert (await client.call("ModelReady", name="imagenette"))[0].ready is (error is None)


@pytest.mark.parametrize(
    ("method", "code"),
    [*((f"Server{name}", None) for name in ("Live", "Ready", "Metadata")), ("ModelReady", INVALID)],
)
async def test_nothing_is_waited_for_where_nothing_is_to_be_read_or_too_much(client, method, code):
    context = context_of(x_grpc_message_prefix="0000100000")
    async with asyncio.timeout(10):
        await getattr(client._methods, method)(stalled_stream(), context)
    assert context.code() is code
    assert code is None or "the limit of this method is 16384" in context.details()


async def test_statistics(client):
    await client.infer(asked(images(IMAGE, IMAGE)))
    await client.infer(asked(images(b"no")))
    (stats,) = (await client.call("ModelStatistics", name="imagenette"))[0].model_stats
    assert (stats.inference_count, stats.execution_count) == (2, 1)
    assert (stats.inference_stats.success.count, stats.inference_stats.fail.count) == (1, 1)
    assert len((await client.call("ModelStatistics"))[0].model_stats) == 3


async def test_keys_are_asked_for_and_probes_need_none(graph, shared):
    graph.service.keys = Keys(["k" * 32])
    for method in OPEN_INFERENCE_METHODS:
        _, context = await shared.call(method)
        is_open = method in ("ServerLive", "ServerReady")
        assert context.code() is (None if is_open else CODE.UNAUTHENTICATED), method
    reply, context = await shared.infer(asked(GOOD), authorization=f"Bearer {'k' * 32}")
    assert context.code() is None
    assert list(reply.outputs[0].contents.fp32_contents) != FIRST


async def test_a_key_without_admin_changes_nothing(graph, shared):
    graph.service.keys = Keys([f"bob:{'k' * 32}:admin=no"])
    refused, bearer = set(), {"authorization": f"Bearer {'k' * 32}"}
    for method in OPEN_INFERENCE_METHODS:
        _, context = await shared.call(method, metadata=bearer)
        if context.code() is CODE.PERMISSION_DENIED:
            assert "the key bob may ask for answers alone" in context.details()
            refused.add(method)
    changes = {f"SystemSharedMemory{way}" for way in ("Register", "Unregister")}
    assert refused == changes | {"RepositoryModelLoad", "RepositoryModelUnload"}


async def test_calls_are_counted_by_their_method(client, told):
    await client.infer(asked(GOOD))
    await client.call("ServerLive")
    service = "/inference.GRPCInferenceService"
    infer, live = f"{service}/ModelInfer", f"{service}/ServerLive"
    assert told.of(REQUESTS) == {(infer, "200", "classify"): 1, (live, "200", "other"): 1}
    assert told.observed(REQUEST_MS) == {("200",): 1}


async def test_regions_are_registered_described_and_forgotten(shared, memory):
    memory.file("k", bytes(100))
    region: dict[str, Any] = {"name": "r", "key": "/k", "offset": 5, "byte_size": 90}
    reply, context = await shared.call("SystemSharedMemoryRegister", **region)
    assert (context.code(), reply) == (None, messages.SystemSharedMemoryRegisterResponse())
    expected = messages.SystemSharedMemoryStatusResponse.RegionStatus(**region)
    for name in ("", "r"):
        reply, _ = await shared.call("SystemSharedMemoryStatus", name=name)
        assert dict(reply.regions) == {"r": expected}
    _, context = await shared.call("SystemSharedMemoryRegister", **region)
    assert context.code() is CODE.ALREADY_EXISTS
    await shared.call("SystemSharedMemoryUnregister", name="r")
    _, context = await shared.call("SystemSharedMemoryStatus", name="r")
    assert context.code() is CODE.NOT_FOUND
    await shared.call("SystemSharedMemoryRegister", **region)
    await shared.call("SystemSharedMemoryUnregister")
    assert not (await shared.call("SystemSharedMemoryStatus"))[0].regions


async def test_inputs_and_outputs_in_regions(shared, memory):
    memory.region(FILE, "in", "a")
    place = memory.region(bytes(100), "out", "b")
    places = {"label": in_region(60, "out", 40), "probabilities": in_region(40, "out")}
    outputs = [output(name, place) for name, place in places.items()]
    reply, context = await shared.infer(asked(placed(len(FILE), "in"), outputs=outputs))
    assert context.code() is None, context.details()
    label, rows = reply.outputs
    assert dict(rows.parameters) == given(in_region(40, "out"))
    assert dict(label.parameters) == given(in_region(len(LABEL), "out", 40))
    assert reply.raw_output_contents == [b"", b""]
    written = place.read_bytes()
    assert np.frombuffer(written[:40], "<f4") == pytest.approx(MEAN, abs=1e-7)
    assert written[40 : 40 + len(LABEL)] == LABEL


@cases(
    "request_, raw, typed",
    (asked(placed(len(FILE))), [b"", LABEL], []),
    (asked(tensor(), raw=[FILE]), [b"", LABEL], []),
    (asked(GOOD), [], [LABELS[1].encode()]),
)
async def test_outputs_beside_those_in_regions(shared, memory, request_, raw, typed):
    memory.region(FILE)
    memory.region(bytes(40), "out", "b")
    request_.outputs.extend([output("probabilities", in_region(40, "out")), output("label")])
    reply, _ = await shared.infer(request_)
    assert reply.raw_output_contents == raw
    assert not reply.outputs[0].HasField("contents")
    assert list(reply.outputs[1].contents.bytes_contents) == typed


@cases(
    "is_on, peer, code, says",
    (False, HERE, INVALID, "shared memory is off here"),
    (True, ELSEWHERE, CODE.PERMISSION_DENIED, "on the service's own machine"),
    (True, "unknown", CODE.PERMISSION_DENIED, "on the service's own machine"),
)
async def test_it_is_off_by_default_and_for_callers_here(graph, memory, is_on, peer, code, says):
    memory.region(FILE)
    client = Client(graph, memory if is_on else None, peer)
    for method in SYSTEM:
        _, context = await client.call(method)
        assert (context.code(), says in context.details()) == (code, True)
    outputs = [output("label", in_region(9, "r"))]
    for request in (asked(placed(len(FILE))), asked(tensor(), raw=[FILE], outputs=outputs)):
        _, context = await client.infer(request)
        assert (context.code(), says in context.details()) == (code, True)
    assert len(memory.regions.status()) == 1
    metadata, _ = await client.call("ServerMetadata")
    assert ("system_shared_memory" in metadata.extensions) is is_on


@cases(
    "metadata, code",
    ({"x_forwarded_for": "203.0.113.5"}, CODE.PERMISSION_DENIED),
    ({"forwarded": "for=203.0.113.5"}, CODE.PERMISSION_DENIED),
    ({"x_forwarded_for": "127.0.0.1"}, None),
)
async def test_a_proxy_that_says_for_whom_it_asks_is_believed(shared, metadata, code):
    _, context = await shared.call("SystemSharedMemoryStatus", metadata=metadata)
    assert context.code() is code


@pytest.mark.parametrize("is_on", [False, True])
async def test_cuda_shared_memory_is_not_supported(graph, memory, is_on):
    client = Client(graph, memory if is_on else None)
    fields = {"name": "r", "raw_handle": b"x", "device_id": 0, "byte_size": 64}
    _, context = await client.call("CudaSharedMemoryRegister", **fields)
    assert context.code() is INVALID
    assert "CUDA shared memory is not supported" in context.details()
    reply, context = await client.call("CudaSharedMemoryStatus")
    assert (context.code(), len(reply.regions)) == (None, 0)
    assert (await client.call("CudaSharedMemoryUnregister"))[1].code() is None


def test_peers_on_this_machine() -> None:
    ours = ["ipv4:127.0.0.1:4321", "ipv6:[::1]:4321", "ipv6:%5B::1%5D:4321"]
    ours += ["ipv6:[::ffff:127.0.0.1]:4321"]
    others = ["ipv4:10.0.0.7:4321", "ipv6:[2001:db8::1]:4321", "ipv6:[::ffff:10.0.0.7]:4321"]
    others += ["unix:/tmp/socket", "unknown", ""]
    assert [peer for peer in ours + others if is_loopback_peer(peer)] == ours
