"""Several sets, and a multi-label one, over gRPC."""

import asyncio
from contextlib import ExitStack
from functools import partial

import grpc
import pytest

from app.errors import NotReadyError
from app.grpc import open_inference_pb2 as messages
from app.grpc.interface import GrpcInterface
from app.grpc.open_inference import OpenInferenceInterface
from app.grpc.tandem_pb2 import ClassifyRequest
from app.oip.inference import Inference
from app.serve.gateway import Assembly, assemble
from app.settings import Settings
from tandem_client.exchange import Options
from tandem_client.grpc_client import _outcomes
from tests.support.grpc_contexts import context_of, stream_of
from tests.support.open_inference import elements
from tests.support.scored_service import scored_service
from tests.support.scored_sets import scored_picture, write_scored_set
from tests.support.several_sets import FIRST, SECOND, labels_of, write_two_sets
from tests.support.tiny_networks import picture

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    folders = write_two_sets(tmp_path_factory.mktemp("sets"))
    return assemble(Settings(model_sets=folders, compile_cache=None))


@pytest.fixture(scope="module")
def service(graph):
    return graph.service


async def classify(service, metadata=None, **asked):
    """Return the reply, and the context; ``metadata`` name a set."""
    message = ClassifyRequest(**{"images": [picture("red")]} | asked).SerializeToString()
    context = context_of(**({"model_set": metadata} if metadata else {}))
    return await GrpcInterface(service).classify(stream_of(message), context), context


def inference_of(name):
    """Return the fields of a request of a blue picture to a model."""
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1]}
    raw = [elements(picture("blue"))]
    return {"model_name": name, "inputs": [tensor], "raw_input_contents": raw}


async def call(interface, method, context=None, **fields):
    """Return the reply of a method of the Open Inference Protocol, and its status."""
    message = getattr(messages, f"{method}Request")(**fields).SerializeToString()
    context = context or context_of(peer="ipv4:127.0.0.1:9")
    return (await interface.call(method, stream_of(message), context)), context.code()


async def test_a_message_names_its_set_or_gets_the_first_or_none_is_found(service):
    for asked, name in ({}, FIRST), ({"model_set": FIRST}, FIRST), ({"model_set": SECOND}, SECOND):
        reply, _ = await classify(service, **asked)
        (result,) = reply.results
        assert result.classified.model_set == name
        assert result.classified.predictions[0].label == labels_of("red")[name]
        assert len(result.classified.predictions) == 3
    reply, context = await classify(service, model_set="nobody")
    assert context.code() is CODE.NOT_FOUND
    assert context.details() == f"no model set 'nobody' is served; there are {FIRST}, {SECOND}"
    assert dict(context.trailing_metadata())["error-code"] == "unknown_model"
    assert not reply.results


async def test_metadata_name_the_set_whose_place_a_call_takes(service):
    """The message is read too late for that: a crowd for the first set would refuse the others."""

    async def code(metadata: str | None = None) -> grpc.StatusCode | None:
        return (await classify(service, metadata, model_set=SECOND))[1].code()

    with ExitStack() as crowd:
        for _ in range(service.settings.max_concurrent_requests):
            crowd.enter_context(service.admission.admit())
        assert await code() is CODE.RESOURCE_EXHAUSTED
        assert await code(SECOND) is None
        assert await code("nobody") is CODE.NOT_FOUND
    assert await code() is None


@pytest.mark.parametrize(("first", "second"), [(FIRST, SECOND), (SECOND, FIRST)])
async def test_metadata_and_message_that_name_two_sets_are_refused(service, first, second):
    _, context = await classify(service, first, model_set=second)
    assert context.code() is CODE.INVALID_ARGUMENT
    said = f"the metadata model-set says {first!r}, the message {second!r}; name the same set"
    assert context.details().startswith(said)


async def test_a_set_that_only_the_message_names_has_its_own_limits(service):
    """A crowd for the second fills its places alone: the first's clients are answered."""
    interface = OpenInferenceInterface(Inference(service))
    first, second = service, service.of_set(SECOND)
    most, seen = service.settings.max_concurrent_requests, []

    async def code(name: str) -> grpc.StatusCode | None:
        return (await call(interface, "ModelInfer", **inference_of(name)))[1]

    async def classify(request):
        seen.append((first.admission.num_under_way, second.admission.num_under_way))
        seen.append((first.byte_budget.num_held > 0, second.byte_budget.num_held > 0))
        return await type(second).classify(second, request)

    with ExitStack() as crowd:
        crowd.callback(setattr, second, "classify", second.classify)
        second.classify = classify
        assert await code(SECOND) is None
        assert seen == [(0, 1), (False, True)]
        for _ in range(most):
            crowd.enter_context(second.admission.admit())
        codes = await asyncio.gather(*(code(SECOND) for _ in range(2 * most)))
        assert set(codes) == {CODE.RESOURCE_EXHAUSTED}
        assert await code(FIRST) is None
    assert await code(SECOND) is None


async def test_each_set_is_a_model_of_the_protocol(service, monkeypatch):
    interface = OpenInferenceInterface(Inference(service))
    for name in (FIRST, SECOND, f"{SECOND}.sure"):
        reply, _ = await call(interface, "ModelInfer", **inference_of(name))
        label = labels_of("blue")[name.partition(".")[0]]
        assert elements(label.encode()) in reply.raw_output_contents
    context = context_of(model_set=SECOND)
    _, code = await call(interface, "ModelInfer", context, **inference_of(FIRST))
    assert code is CODE.INVALID_ARGUMENT  # never another set's answer

    async def gone() -> None:
        raise NotReadyError("its member hangs")

    monkeypatch.setattr(service.of_set(SECOND), "check_ready", gone)
    assert not (await call(interface, "ModelReady", name=SECOND))[0].ready
    assert (await call(interface, "ModelReady", name=FIRST))[0].ready
    assert not (await call(interface, "ServerReady"))[0].ready


async def test_a_set_is_unloaded_and_loaded_by_tritons_methods(graph, service, monkeypatch):
    interface = OpenInferenceInterface(Inference(service, loader=graph.sets))
    load, unload = (partial(call, interface, f"RepositoryModel{way}") for way in ("Load", "Unload"))

    async def ready() -> set[str]:
        index, _ = await call(interface, "RepositoryIndex", ready=True)
        return {entry.name for entry in index.models} & {FIRST, SECOND}

    _, code = await unload(model_name=SECOND)
    assert code is CODE.PERMISSION_DENIED  # without keys, nobody knows where
    monkeypatch.setenv("TANDEM_ON_LOOPBACK", "1")
    _, code = await unload(context_of(peer="ipv4:192.0.2.1:9"), model_name=SECOND)
    assert code is CODE.PERMISSION_DENIED
    assert await ready() == {FIRST, SECOND}
    assert (await unload(model_name=SECOND))[1] is None
    assert await ready() == {FIRST}
    index, _ = await call(interface, "RepositoryIndex")
    assert {entry.name: entry.state for entry in index.models}[SECOND] == "UNAVAILABLE"
    assert (await unload(model_name=FIRST))[1] is CODE.INVALID_ARGUMENT
    assert (await load(model_name="nobody"))[1] is CODE.NOT_FOUND
    config = {"config": messages.ModelRepositoryParameter(string_param="{}")}
    assert (await load(model_name=SECOND, parameters=config))[1] is CODE.INVALID_ARGUMENT
    assert (await load(model_name=SECOND))[1] is None
    assert await ready() == {FIRST, SECOND}


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory):
    return scored_service(str(write_scored_set(tmp_path_factory.mktemp("scored"))))


async def classify_scored(scored, *names, **asked):
    return await classify(scored, images=[scored_picture(name) for name in names], **asked)


async def test_each_image_has_its_list_by_any_threshold_and_the_client_reads_it(scored):
    reply, _ = await classify_scored(scored, "cyan", "black")
    cyan, black = (result.classified for result in reply.results)
    assert [prediction.label for prediction in cyan.predictions] == ["has blue", "has green"]
    assert cyan.threshold == 0.5
    assert not black.predictions
    assert not black.members["steep"].HasField("label")
    assert cyan.members["steep"].label == "has blue"
    cyan, black = _outcomes(reply, 2, Options("grpc://x"))
    assert cyan.labels == ("has blue", "has green")
    assert (black.labels, black.threshold, black.members["flat"].label) == ((), 0.5, None)
    reply, _ = await classify_scored(scored, "red", threshold=0.01, top_k=3)
    (red,) = reply.results
    assert (len(red.classified.predictions), red.classified.threshold) == (3, 0.01)
    reply, context = await classify_scored(scored, "red", threshold=1.5)
    assert context.code() is CODE.INVALID_ARGUMENT
