"""Ensemble.Classify, health and reflection: messages, statuses, times."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import anyio.to_thread
import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2 as messages_reflection
from grpc_tools import protoc
from ray.serve._private import grpc_util

import app.errors
from app import answers
from app.access import Keys
from app.errors import (
    PREFIX_METADATA,
    REFUSED_HEADER,
    BadParameterError,
    FunctionError,
    NotReadyError,
    OverloadedError,
)
from app.grpc import tandem_pb2 as messages
from app.grpc.call import add_servicer, announced_bytes, code_of, number_of, timeout_s_of
from app.grpc.interface import MAX_REFLECTIONS, GrpcInterface, HealthInterface
from app.grpc.tandem_pb2 import ClassifyReply, ClassifyRequest
from app.launch.config import ADD_SERVICER, ServeConfig, with_grpc
from app.serve.ray_compatibility import REFLECTION, check_ray
from app.serve.replica import limit_reflection
from app.settings import Settings
from app.telemetry.metric_table import REQUEST_MS, REQUESTS, STAGE_MS
from models import ensemble
from models.errors import TandemError
from tests.support.cases import cases
from tests.support.configurations import GOOD
from tests.support.fakes import FakeService
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.grpc_replica import grpc_replica
from tests.support.hand_clock import HandClock
from tests.support.open_inference import Graph
from tests.support.reflection_v1 import V1, reflection_v1

pytestmark = pytest.mark.usefixtures("behind_haproxy")

ROOT = Path(__file__).parents[3]
CODE = grpc.StatusCode
OF_2_60 = pytest.mark.skipif(not REFLECTION.fits(), reason="Ray 2.59 has no reflection")
UNITS = {"H": 3600, "M": 60, "S": 1, "m": 1e-3, "u": 1e-6, "n": 1e-9}
NO_DEADLINES = ["", "1", "S", "1x", "-1S", "123456789S", "1S1S"]
UNKNOWN = ["", "0100000005", "00000000", "00000000051", "00zzzzzzzz"]  # or compressed
STATUS = health_pb2.HealthCheckResponse
SERVICES = {
    "tandem.v1.Ensemble",
    "inference.GRPCInferenceService",
    "tensorflow.serving.ModelService",
    "tensorflow.serving.PredictionService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}
Request = messages_reflection.ServerReflectionRequest
KEY = "k" * 32


@cases(
    "name, kinds",
    ("tandem", ("python", "pyi", "grpc_python")),
    *((name, ("python", "pyi")) for name in ("open_inference", "tensorflow_serving")),
)
def test_the_files_are_those_that_the_definition_makes(tmp_path, monkeypatch, name, kinds):
    monkeypatch.chdir(ROOT)
    proto = f"app/grpc/{name}.proto"
    includes = ("-I.", f"-I{Path(protoc.__file__).parent / '_proto'}")
    outputs = (f"--{kind}_out={tmp_path}" for kind in kinds)
    assert protoc.main(["protoc", *includes, *outputs, proto]) == 0
    made = {path.name: path.read_text() for path in (tmp_path / "app" / "grpc").iterdir()}
    ends = {"python": "pb2.py", "pyi": "pb2.pyi", "grpc_python": "pb2_grpc.py"}
    assert set(made) == {f"{name}_{ends[kind]}" for kind in kinds}
    for name, text in made.items():
        assert text == (ROOT / "app" / "grpc" / name).read_text(), f"{name}: make proto"


@cases(
    "message, model, more",
    (messages.Classified, answers.Classified, set()),
    (messages.Prediction, ensemble.Prediction, set()),
    (messages.MemberOpinion, answers.MemberOpinion, set()),
    (messages.Timings, answers.Timings, set()),
    (messages.Stage, answers.StageTiming, set()),
    (messages.Error, answers.ErrorDetail, {"status"}),
)
def test_messages_have_the_fields_of_the_json(message, model: type, more: set[str]):
    in_json = {field.name for field in fields(model)} - {"probabilities"}  # tensors' requests' only
    assert set(message.DESCRIPTOR.fields_by_name) == in_json | more


def errors() -> list[type[TandemError]]:
    assert app.errors  # its classes are there
    every = [TandemError]
    for error in every:
        every += error.__subclasses__()
    return every


def test_every_error_has_a_status_that_says_whether_to_send_again():
    for error in errors():
        assert (code_of(error.status) is CODE.INTERNAL) == (error.status == 500), error
    again = {429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}
    assert {status: code_of(status).name for status in again} == again
    assert {code_of(s).name for s in (400, 413, 415, 422)} == {"INVALID_ARGUMENT"}
    assert (number_of(200), number_of(422), number_of(500)) == (0, 3, 13)


@cases(
    "metadata, expected",
    ({}, None),
    ({"x-request-timeout-seconds": "0.5"}, 0.5),
    ({"x-request-timeout-seconds": "99", "x-grpc-timeout": "10S"}, 9.0),  # the shorter one
    ({"x-grpc-timeout": "2000m"}, 1.8),
    *(({"x-grpc-timeout": f"1{unit}"}, 0.9 * seconds) for unit, seconds in UNITS.items()),
    *(({"x-grpc-timeout": value}, None) for value in NO_DEADLINES),  # ignored
)
def test_the_shorter_of_a_clients_times_counts(metadata, expected):
    assert timeout_s_of(metadata) == (expected and pytest.approx(expected))


@pytest.mark.parametrize("value", ["nan", "-1", "0", "soon", ""])
def test_a_time_that_makes_no_sense(value):
    with pytest.raises(BadParameterError, match="seconds as a number above 0"):
        timeout_s_of({"x-request-timeout-seconds": value})


@cases(
    "metadata, expected",
    ({PREFIX_METADATA: "0000000000"}, 0),
    ({PREFIX_METADATA: "000140000A"}, 0x140000A),
    ({PREFIX_METADATA: "00ffffffff"}, 2**32 - 1),
    *(({PREFIX_METADATA: prefix}, None) for prefix in UNKNOWN),
    ({}, None),
)
def test_the_length_that_a_message_announces(metadata, expected):
    assert announced_bytes(metadata) == expected


def test_grpc_is_off_unless_asked_for():
    def port(content: dict[str, Any]) -> int | None:
        return ServeConfig.of({**GOOD, **content}).grpc_port

    assert port({}) is None
    assert port({"grpc_options": {"port": 9000}}) is None  # as Serve sees it: no servicer
    content = with_grpc({"grpc_options": {"request_timeout_s": 20}}, 9001)
    assert content["grpc_options"]["request_timeout_s"] == 20
    assert port(content) == 9001
    assert port(with_grpc(content, None)) == 9001
    assert with_grpc({"grpc_options": {"port": 9000}}, None) == {"grpc_options": {"port": 9000}}


def test_our_servicer_replaces_the_generated_and_serve_imports_it():
    generated = "app.grpc.tandem_pb2_grpc.add_EnsembleServicer_to_server"
    options = {"port": 9000, "grpc_servicer_functions": ["other.add", generated]}
    changed = with_grpc({"grpc_options": options}, None)["grpc_options"]
    assert changed == {"port": 9000, "grpc_servicer_functions": ["other.add", ADD_SERVICER]}
    assert options["grpc_servicer_functions"] == ["other.add", generated]  # the caller's own
    from ray.serve.config import gRPCOptions

    (add,) = gRPCOptions(grpc_servicer_functions=[ADD_SERVICER]).grpc_servicer_func_callable
    assert add is add_servicer


async def asked(graph: Graph, service: str) -> tuple[Any, Any]:
    """Return the reply, and the context that has its status."""
    context = context_of()
    data = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return await HealthInterface(graph.service).check(stream_of(data), context), context


@pytest.mark.parametrize("name", ["", "tandem.v1.Ensemble", "inference.GRPCInferenceService"])
@pytest.mark.parametrize("error", [None, NotReadyError("a member does not answer")])
async def test_it_serves_exactly_when_it_is_ready(name, error):
    graph = Graph()
    graph.service.keys = Keys(["k" * 32])  # of which a probe has none
    graph.members["resnet50"].raises = error
    reply, context = await asked(graph, name)
    assert reply.status == (STATUS.NOT_SERVING if error else STATUS.SERVING)
    assert context.code() is None


async def test_a_name_that_is_not_served_and_a_message_that_is_none():
    _, context = await asked(Graph(), "inference.GRPCInferenceServic")
    assert context.code() is CODE.NOT_FOUND
    assert "'inference.GRPCInferenceServic'" in context.details()
    assert "tandem.v1.Ensemble" in context.details()
    context = context_of()
    await HealthInterface(Graph().service).check(stream_of(b"\xff\xff"), context)
    assert context.code() is CODE.INVALID_ARGUMENT


@pytest.fixture
async def port(monkeypatch):
    enabled = grpc_util.enable_server_reflection  # put back after the test
    monkeypatch.setattr(grpc_util, "enable_server_reflection", enabled)
    for _ in range(2):  # Serve prepares a process for each of its servers
        limit_reflection()
    async with grpc_replica(GrpcInterface(FakeService(Settings()))) as port:
        yield port


async def at(port, ask):
    """Return what a blocking client gets; the server is on this loop."""

    def asked() -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            return ask(channel)

    return await anyio.to_thread.run_sync(asked)


@OF_2_60
async def test_a_client_of_v1_finds_every_service_and_its_messages(port: int) -> None:
    def described(channel: grpc.Channel) -> tuple[set[str], list[str], str]:
        database = reflection_v1(channel)
        pool = DescriptorPool(database)
        methods = [pool.FindServiceByName(name).methods[0].name for name in sorted(SERVICES)]
        field = pool.FindMessageTypeByName("tandem.v1.ClassifyRequest").fields_by_name["images"]
        return set(database.get_services()), methods, field.full_name

    names, methods, field = await at(port, described)
    assert names == SERVICES
    info = "ServerReflectionInfo"
    assert methods == ["Check", info, info, "ServerLive", "Classify", "GetModelStatus", "Predict"]
    assert field == "tandem.v1.ClassifyRequest.images"


@OF_2_60
async def test_what_is_not_there(port: int) -> None:
    asked = [Request(file_containing_symbol="tandem.v1.Ensembl"), Request()]

    def answers(channel: grpc.Channel) -> list[Any]:
        response = messages_reflection.ServerReflectionResponse.FromString
        call = channel.stream_stream(V1, Request.SerializeToString, response)
        return [*call(iter(asked), timeout=60)]

    unknown, empty = await at(port, answers)
    assert unknown.error_response.error_code == CODE.NOT_FOUND.value[0]
    assert unknown.original_request == asked[0]
    assert empty.error_response.error_code == CODE.INVALID_ARGUMENT.value[0]


async def endless(channel: grpc.aio.Channel, path: str) -> Any:
    """Begin a call of reflection that never ends by itself; return it once it was answered."""
    response = messages_reflection.ServerReflectionResponse.FromString
    call = channel.stream_stream(path, Request.SerializeToString, response)()
    await call.write(Request(list_services=""))
    assert (await call.read()).list_services_response.service
    return call


@OF_2_60
@pytest.mark.parametrize("path", [V1, V1.replace("v1", "v1alpha")])
async def test_endless_calls_of_reflection_give_way_to_others(port: int, path: str) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = [await endless(channel, path) for _ in range(MAX_REFLECTIONS + 1)]
        assert await calls[0].code() is CODE.DEADLINE_EXCEEDED
        assert "less where others begin; call again" in await calls[0].details()
        assert not calls[1].done()


@OF_2_60
async def test_endless_calls_of_reflection_do_not_delay_a_stop(monkeypatch) -> None:
    monkeypatch.setattr(grpc_util, "enable_server_reflection", grpc_util.enable_server_reflection)
    monkeypatch.setattr("app.grpc.interface.REFLECTION_LASTS_S", 0.3)
    limit_reflection()
    interface = GrpcInterface(FakeService(Settings()))
    async with AsyncExitStack() as server:
        port = await server.enter_async_context(grpc_replica(interface, grace_s=15))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = [await endless(channel, V1) for _ in range(5)]
            started = time.monotonic()
            await server.aclose()
            assert time.monotonic() - started < 10
            assert [await call.code() for call in calls] == [CODE.DEADLINE_EXCEEDED] * 5


@OF_2_60
def test_with_another_ray_v1_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(grpc_util, "get_service_names")
    before = grpc_util.enable_server_reflection
    limit_reflection()
    assert grpc_util.enable_server_reflection is before
    (warning,) = check_ray([REFLECTION])
    assert "get_service_names is not there. Left out: gRPC reflection v1" in warning


async def classify(service: FakeService, *images: bytes, top_k: int | None = None, **metadata: Any):
    """Return the reply, and the context that has its status."""
    context = context_of(**metadata)
    incoming = stream_of(ClassifyRequest(images=images, top_k=top_k).SerializeToString())
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
    assert second.error.status == CODE.INVALID_ARGUMENT.value[0]
    assert reply.request_id == "r1"
    assert context.code() is None  # nobody but Serve says OK
    assert trailing(context) == {"request_id": "r1"}
    (asked,) = service.requests
    assert asked.files == [b"image a", b"no", b"image b"]
    assert (asked.top_k, asked.timeout_s, asked.lane) == (5, 10.0, "bulk")


async def test_the_answer_is_that_of_http(service, client):
    service.skipped = ["b"]
    files = [("files", ("0", b"image a")), ("files", ("1", b"no"))]
    form = await client.post("/v1/classify", files=files, headers={"x-request-id": "r1"})
    reply, _ = await classify(service, b"image a", b"no")
    as_json = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}
    told = MessageToDict(reply, **as_json)
    good, bad = told["results"]
    assert bad["error"].pop("status") == 3  # what HTTP says in its status line
    assert good["classified"].pop("missing_members") == {}  # which JSON leaves out
    assert [good["classified"].pop(name) for name in ("asked", "answer_set", "embedding")] == [
        []
    ] * 3
    assert [good["classified"], bad] == form.json()["results"]
    assert told["request_id"] == form.json()["request_id"]


async def test_top_k_and_time_and_lane_are_handed_on(service):
    more = {"x_request_timeout_seconds": "2.5", "priority": "u=6", REFUSED_HEADER: "30"}
    await classify(service, b"image", top_k=3, something_bin=b"\xff", **more)
    service.answer_within(4.0)
    await classify(service, b"image")
    await classify(service, b"image", x_request_timeout_seconds="2.5")
    asked, whole, shortened = service.requests
    assert (asked.top_k, asked.timeout_s, asked.lane) == (3, 2.5, "bulk")
    assert service.admission.num_refused_before == 30  # by HAProxy
    assert 4.0 <= whole.timeout_s < 9  # from when the message was read
    assert shortened.timeout_s == 2.5


@cases(
    "images, top_k, code, says",
    ([], None, "bad_parameter", "no image"),
    ([b"image"] * 4, None, "too_many_files", "4 images, the limit is 3"),
    ([b"image", bytes(996)], None, "too_many_bytes", "1001 bytes, the limit is 1000"),
    *(([b"image"], k, "bad_parameter", f"top_k is {k};") for k in (0, -1, 11, 2**31 - 1)),
    ([b"image"], 11, "bad_parameter", "ask for 1 to 10"),
)
async def test_limits(service, images, top_k, code, says):
    reply, context = await classify(service, *images, top_k=top_k)
    assert reply == ClassifyReply()
    assert context.code() is CODE.INVALID_ARGUMENT
    assert says in context.details()
    assert trailing(context)["error-code"] == code
    assert service.requests == []


async def test_a_full_gateway_says_when_to_come_back_and_so_do_bytes_that_have_no_room(service):
    with service.byte_budget.share() as others:
        others.grow(service.byte_budget.limit)
        _, context = await classify(service, b"image")
    assert context.code() is CODE.RESOURCE_EXHAUSTED
    assert (await classify(service, b"image"))[1].code() is None
    assert service.byte_budget.num_held == 0
    service.admission.is_full = True
    _, context = await classify(service, b"image")
    assert context.code() is CODE.RESOURCE_EXHAUSTED
    told = {"error-code": "overloaded", "grpc-retry-pushback-ms": "1000"}
    assert trailing(context) == {"request_id": "r1"} | told


async def test_calls_are_counted_as_http_is(service, told):
    await classify(service, b"image")
    await classify(service, b"image", top_k=99)
    service.raises = OverloadedError("full")
    await classify(service, b"image")
    service.raises = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await classify(service, b"image")
    statuses, route = ("200", "422", "429", "499"), "/tandem.v1.Ensemble/Classify"
    assert told.of(REQUESTS) == {(route, status, "classify"): 1 for status in statuses}
    assert set(told.observed(REQUEST_MS)) == {(status,) for status in statuses}
    assert told.observed(STAGE_MS) == {("encode", "none"): 1}


@pytest.mark.parametrize("value", [None, f"Bearer {KEY[:-1]}", "Bearer \u2713\udcff", KEY])
async def test_keys_are_asked_for_as_over_http(service, value):
    service.keys = Keys([KEY])
    _, context = await classify(service, b"image", **({"authorization": value} if value else {}))
    assert context.code() is CODE.UNAUTHENTICATED
    assert service.requests == []
    assert KEY not in context.details()
    _, context = await classify(service, b"image", authorization=f"Bearer {KEY}")
    assert context.code() is None


async def test_limits_of_a_key_are_as_over_http(service):
    clock = HandClock()
    service.keys = Keys([f"bob:{KEY}:rate=0.25,sets=fake,lane=bulk"], clock=clock)
    sent: Any = {"authorization": f"Bearer {KEY}", "priority": "u=0"}
    _, context = await classify(service, b"image", **sent)
    assert (context.code(), service.requests[0].lane) == (None, "bulk")
    assert service.requests[0].caller.name == "bob"
    clock.now += 1.5
    _, context = await classify(service, b"image", **sent)
    assert context.code() is CODE.RESOURCE_EXHAUSTED
    assert "the key bob may send 0.25 requests a second" in context.details()
    refusal = {"error-code": "rate_limited", "grpc-retry-pushback-ms": "2500"}
    assert trailing(context).items() >= refusal.items()
    assert (service.keys.figures["bob"].answered, service.keys.figures["bob"].refused) == (1, 1)


async def test_a_message_that_was_received_before_anybody_was_asked(service):
    """As with the generated function in grpc_servicer_functions."""
    request = ClassifyRequest(images=[b"image"], top_k=3)
    reply = await GrpcInterface(service).classify(request, context_of())
    assert reply.results[0].classified.predictions[0].label == "image"
    assert service.requests[0].top_k == 3


@pytest.mark.parametrize(
    ("sent", "says"),
    [([], "the call has no message"), ([b"\xff\xff no message"], "13 bytes are no tandem.v1")],
)
async def test_what_is_no_request(service, sent, says):
    context = context_of()
    reply = await GrpcInterface(service).classify(stream_of(*sent), context)
    assert (reply, service.requests) == (ClassifyReply(), [])
    assert context.code() is CODE.INVALID_ARGUMENT
    assert says in context.details()
    assert trailing(context)["error-code"] == "bad_parameter"


@cases(
    "error, logged",
    (FunctionError("combine failed"), "request r1: combine failed"),
    (ZeroDivisionError("secret"), "request r1 failed"),
)
async def test_what_is_ours_to_mend_is_logged_with_the_calls_id(service, caplog, error, logged):
    service.raises = error
    with caplog.at_level(logging.ERROR, "ray.serve"):
        _, context = await classify(service, b"image", request_id="r1")
    assert [(line.message, line.request_id) for line in caplog.records] == [(logged, "r1")]
    assert context.code() is CODE.INTERNAL
    assert "secret" not in context.details()
