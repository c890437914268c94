"""Shared memory over gRPC, with the real service in front of members of the test."""

from typing import Any

import grpc
import numpy as np
import pytest

from app.access import Keys
from app.grpc import open_inference_pb2 as messages
from app.grpc.call import is_loopback_peer
from app.grpc.open_inference import OpenInferenceInterface, OpenInferenceMethods
from app.oip.inference import Inference
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.open_inference import IMAGE, LABELS, MEAN, Graph, drawn, elements
from tests.support.shared_regions import Memory, in_region

HERE, ELSEWHERE = "ipv4:127.0.0.1:5", "ipv4:10.0.0.7:5"
CODE = grpc.StatusCode
FILE = elements(IMAGE)
SYSTEM = ("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister")


@pytest.fixture
def memory(tmp_path) -> Memory:
    return Memory(tmp_path)


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph, memory) -> "Client":
    return Client(graph, memory)


class Client:
    """Calls methods in this process, as Serve does, from ``peer``."""

    def __init__(self, graph: Graph, memory: Memory | None, peer: str = HERE) -> None:
        regions = memory.regions if memory else None
        self._methods, self._peer = OpenInferenceMethods(), peer
        self._methods._open_inference = OpenInferenceInterface(Inference(graph.service, regions))

    async def call(
        self, method: str, request: Any = None, metadata: Any = None, **fields: Any
    ) -> tuple[Any, Any]:
        """Return the reply, and the context that has its status."""
        request = request or getattr(messages, f"{method}Request")(**fields)
        context = context_of(peer=self._peer, **(metadata or {}))
        stream = stream_of(request.SerializeToString())
        return await getattr(self._methods, method)(incoming=stream, grpc_context=context), context


def given(parameters: dict[str, Any]) -> dict[str, Any]:
    kinds = {int: "int64_param", str: "string_param", bool: "bool_param"}
    return {
        name: messages.InferParameter(**{kinds[type(value)]: value})
        for name, value in parameters.items()
    }


def tensor(parameters: dict[str, Any], name: str = "image", shape: Any = (1,), **more: Any) -> Any:
    return messages.ModelInferRequest.InferInputTensor(
        name=name,
        datatype="BYTES" if name == "image" else "UINT8",
        shape=shape,
        parameters=given(parameters),
        **more,
    )


def output(name: str, parameters: dict[str, Any] | None = None) -> Any:
    return messages.ModelInferRequest.InferRequestedOutputTensor(
        name=name, parameters=given(parameters or {})
    )


def asked(*inputs: Any, **fields: Any) -> Any:
    return messages.ModelInferRequest(model_name="imagenette", inputs=inputs, **fields)


async def test_regions_are_registered_described_and_forgotten(client, memory):
    memory.file("k", bytes(100))
    region: dict[str, Any] = {"name": "r", "key": "/k", "offset": 5, "byte_size": 90}
    reply, context = await client.call("SystemSharedMemoryRegister", **region)
    assert (context.code(), reply) == (None, messages.SystemSharedMemoryRegisterResponse())
    expected = messages.SystemSharedMemoryStatusResponse.RegionStatus(**region)
    for name in ("", "r"):
        reply, _ = await client.call("SystemSharedMemoryStatus", name=name)
        assert dict(reply.regions) == {"r": expected}
    _, context = await client.call("SystemSharedMemoryRegister", **region)
    assert context.code() is CODE.ALREADY_EXISTS
    await client.call("SystemSharedMemoryUnregister", name="r")
    _, context = await client.call("SystemSharedMemoryStatus", name="r")
    assert context.code() is CODE.NOT_FOUND
    await client.call("SystemSharedMemoryRegister", **region)
    await client.call("SystemSharedMemoryUnregister")
    assert not (await client.call("SystemSharedMemoryStatus"))[0].regions


@pytest.mark.parametrize("way", ["image", "pixels"])
async def test_inputs_and_outputs_in_regions(client, memory, way):
    data, shape = (FILE, [1]) if way == "image" else (drawn().tobytes(), drawn().shape)
    memory.region(data, "in", "a")
    place = memory.region(bytes(100), "out", "b")
    outputs = [
        output("label", in_region(60, "out", 40)),
        output("probabilities", in_region(40, "out")),
    ]
    request = asked(tensor(in_region(len(data), "in"), way, shape), outputs=outputs)
    reply, context = await client.call("ModelInfer", request)
    assert context.code() is None, context.details()
    label, rows = reply.outputs
    packed = elements(LABELS[1].encode())
    assert rows.parameters["shared_memory_byte_size"].int64_param == 40
    assert "shared_memory_offset" not in rows.parameters
    assert label.parameters["shared_memory_region"].string_param == "out"
    assert label.parameters["shared_memory_offset"].int64_param == 40
    assert label.parameters["shared_memory_byte_size"].int64_param == len(packed)
    assert reply.raw_output_contents == [b"", b""]
    written = place.read_bytes()
    assert np.frombuffer(written[:40], "<f4") == pytest.approx(MEAN, abs=1e-7)
    assert written[40 : 40 + len(packed)] == packed


async def test_raw_outputs_keep_their_places_beside_those_in_regions(client, memory):
    memory.region(FILE)
    memory.region(bytes(40), "out", "b")
    outputs = [output("probabilities", in_region(40, "out")), output("label")]
    for request in (
        asked(tensor(in_region(len(FILE))), outputs=outputs),
        asked(tensor({}), outputs=outputs, raw_input_contents=[FILE]),
    ):
        reply, _ = await client.call("ModelInfer", request)
        assert reply.raw_output_contents == [b"", elements(LABELS[1].encode())]


async def test_typed_outputs_beside_those_in_regions(client, memory):
    memory.region(bytes(40), "out", "b")
    outputs = [output("probabilities", in_region(40, "out")), output("label")]
    contents = messages.InferTensorContents(bytes_contents=[IMAGE])
    reply, _ = await client.call(
        "ModelInfer", asked(tensor({}, contents=contents), outputs=outputs)
    )
    assert not reply.outputs[0].HasField("contents")
    assert list(reply.outputs[1].contents.bytes_contents) == [LABELS[1].encode()]


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        (asked(tensor(in_region(9, "x"))), "NOT_FOUND", "'x' is not registered"),
        (asked(tensor(in_region(999))), "INVALID_ARGUMENT", "999 from 0 on are asked for"),
        (asked(tensor(in_region(-1))), "INVALID_ARGUMENT", "give a size from 1"),
        (asked(tensor(in_region(9, offset=-1))), "INVALID_ARGUMENT", "an offset from 0"),
        (
            asked(tensor({"shared_memory_region": "r"})),
            "INVALID_ARGUMENT",
            "shared_memory_byte_size is None",
        ),
        (
            asked(tensor({"shared_memory_region": 3, "shared_memory_byte_size": 9})),
            "INVALID_ARGUMENT",
            "shared_memory_region is 3",
        ),
        (
            asked(tensor(in_region(len(FILE))), raw_input_contents=[FILE]),
            "INVALID_ARGUMENT",
            "has 1 entries for 0 inputs",
        ),
        (
            asked(
                tensor(
                    in_region(len(FILE)),
                    contents=messages.InferTensorContents(bytes_contents=[IMAGE]),
                )
            ),
            "INVALID_ARGUMENT",
            "has data and a region",
        ),
        (
            asked(
                tensor(in_region(len(FILE))), outputs=[output("probabilities", in_region(39, "r"))]
            ),
            "INVALID_ARGUMENT",
            "has 40 bytes, and 39 of shared memory",
        ),
    ],
)
async def test_requests_that_no_region_fits(client, memory, request_, code, says):
    memory.region(FILE)
    reply, context = await client.call("ModelInfer", request_)
    assert context.code() is CODE[code]
    assert says in context.details()
    assert reply == messages.ModelInferResponse()
    good = asked(tensor(in_region(len(FILE))))
    assert len((await client.call("ModelInfer", good))[0].outputs) == 2


@pytest.mark.parametrize(
    ("is_on", "peer", "code", "says"),
    [
        (False, HERE, CODE.INVALID_ARGUMENT, "shared memory is off here"),
        (True, ELSEWHERE, CODE.PERMISSION_DENIED, "on the service's own machine"),
        (True, "unknown", CODE.PERMISSION_DENIED, "on the service's own machine"),
    ],
)
async def test_it_is_off_by_default_and_for_callers_here(graph, memory, is_on, peer, code, says):
    memory.region(FILE)
    client = Client(graph, memory if is_on else None, peer)
    for method in SYSTEM:
        _, context = await client.call(method)
        assert (context.code(), says in context.details()) == (code, True)
    outputs = [output("label", in_region(9, "r"))]
    for request in (
        asked(tensor(in_region(len(FILE)))),
        asked(tensor({}), raw_input_contents=[FILE], outputs=outputs),
    ):
        _, context = await client.call("ModelInfer", request)
        assert (context.code(), says in context.details()) == (code, True)
    assert len(memory.regions.status()) == 1
    metadata, _ = await client.call("ServerMetadata")
    assert ("system_shared_memory" in metadata.extensions) is is_on


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({"x_forwarded_for": "203.0.113.5"}, CODE.PERMISSION_DENIED),
        ({"forwarded": "for=203.0.113.5"}, CODE.PERMISSION_DENIED),
        ({"x_forwarded_for": "127.0.0.1"}, None),
    ],
)
async def test_a_proxy_that_says_for_whom_it_asks_is_believed(client, metadata, code):
    _, context = await client.call("SystemSharedMemoryStatus", metadata=metadata)
    assert context.code() is code


@pytest.mark.parametrize("is_on", [False, True])
async def test_cuda_shared_memory_is_not_supported(graph, memory, is_on):
    client = Client(graph, memory if is_on else None)
    fields = {"name": "r", "raw_handle": b"x", "device_id": 0, "byte_size": 64}
    _, context = await client.call("CudaSharedMemoryRegister", **fields)
    assert context.code() is CODE.INVALID_ARGUMENT
    assert "CUDA shared memory is not supported" in context.details()
    reply, context = await client.call("CudaSharedMemoryStatus")
    assert (context.code(), len(reply.regions)) == (None, 0)
    _, context = await client.call("CudaSharedMemoryUnregister")
    assert context.code() is None


async def test_keys_come_before_regions(graph, memory):
    graph.service.keys = Keys(["k" * 32])
    for method in SYSTEM:
        _, context = await Client(graph, memory).call(method)
        assert context.code() is CODE.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:127.0.0.1:4321", True),
        ("ipv6:[::1]:4321", True),
        ("ipv6:%5B::1%5D:4321", True),
        ("ipv6:[::ffff:127.0.0.1]:4321", True),
        ("ipv4:10.0.0.7:4321", False),
        ("ipv6:[2001:db8::1]:4321", False),
        ("ipv6:[::ffff:10.0.0.7]:4321", False),
        ("unix:/tmp/socket", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_peers_on_this_machine(peer: str, expected: bool) -> None:
    assert is_loopback_peer(peer) is expected
