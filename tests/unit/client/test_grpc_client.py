"""The client over gRPC against a server in this process, which the tests script."""

import inspect
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from PIL import Image

from app import errors
from app.grpc.call import code_of
from app.grpc.tandem_pb2 import ClassifyReply, ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleServicer, add_EnsembleServicer_to_server
from models.errors import TooManyPixelsError, UnsupportedFormatError
from tandem_client import (
    AsyncClient,
    BadAnswer,
    BadImage,
    BadRequest,
    Client,
    DeadlineExceeded,
    Degraded,
    NotReady,
    Overloaded,
    RetryPolicy,
    ServiceError,
    TandemError,
    Unauthorized,
    Unreachable,
)
from tandem_client.grpc_client import GrpcClient
from tandem_client.images import CallArguments, CallOptions
from tests.support.cases import cases
from tests.support.http_server import classified
from tests.support.scripted_service import SleepingClock

ROOT = Path(__file__).parents[3]
KEY = "k" * 32
CODE = grpc.StatusCode
NOT_AN_IMAGE = {"code": "not_an_image", "message": "no image", "request_id": "r2", "status": 3}
Step = Callable[[ClassifyRequest, grpc.ServicerContext], ClassifyReply]


def reply(*rows: dict) -> ClassifyReply:
    results = [{"error": row} if "code" in row else {"classified": row} for row in rows]
    return ParseDict({"results": results, "request_id": "r2"}, ClassifyReply())


def answering(*rows: dict) -> Step:
    return lambda *_: reply(*(rows or [classified()]))


def failing(code: grpc.StatusCode, message: str = "what was wrong", **trailing: str) -> Step:
    def step(_: ClassifyRequest, context: grpc.ServicerContext) -> ClassifyReply:
        context.set_trailing_metadata([*trailing.items()])
        context.abort(code, message)
        raise AssertionError

    return step


class Scripted(EnsembleServicer):
    """Answers one call after another with its steps, then as a service does that is well."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.requests: list[ClassifyRequest] = []
        self.metadata: list[dict[str, str]] = []

    def Classify(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        return (self.steps.pop(0) if self.steps else answering())(request, context)


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[tuple[Scripted, str]]:
    servicer = Scripted()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        add_EnsembleServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield servicer, f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture
def scripted(scripted_server: tuple[Scripted, str]) -> Scripted:
    servicer, _ = scripted_server
    servicer.__init__()  # type: ignore[misc]
    return servicer


@pytest.fixture
def make(scripted_server: tuple[Scripted, str], scripted: Scripted):
    """Make a client on a clock that its waits move."""
    made = []

    def make(**options) -> tuple[GrpcClient, SleepingClock]:
        client, clock = GrpcClient(scripted_server[1], **options), SleepingClock()
        client._now = clock
        client._sleep = clock.sleep  # type: ignore[assignment]
        made.append(client)
        return client, clock

    yield make
    for client in made:
        client.close()


@pytest.mark.parametrize("kind", ["py", "pyi"])
def test_the_messages_are_the_applications(kind):
    ours = ROOT / "client" / "tandem_client" / f"tandem_pb2.{kind}"
    assert ours.read_bytes() == (ROOT / f"app/grpc/tandem_pb2.{kind}").read_bytes(), "make proto"


def test_an_answer_and_what_was_sent(make, scripted):
    stage = {"stage": "infer", "start_ms": 1.5, "duration_ms": 8.0, "member": "a", "batch_size": 4}
    more = {"cached": True, "timings_ms": {"total": 9.0, "stages": [stage]}}
    scripted.steps = [answering(classified("church") | more)]
    client, _ = make(api_key=KEY)
    answer = client.classify(b"photo", top_k=3, priority=6, timeout=20)
    assert (answer.label, answer.probability, answer.cached) == ("church", 0.9, True)
    assert (answer.members["a"].label, answer.timings.stages[0].batch_size) == ("church", 4)
    (request,), (metadata,) = scripted.requests, scripted.metadata
    assert (list(request.images), request.top_k) == ([b"photo"], 3)
    assert (metadata["authorization"], metadata["priority"]) == (f"Bearer {KEY}", "u=6")
    assert metadata["x-request-timeout-seconds"] == "20.000"
    assert KEY not in f"{client!r} {vars(client)}"


def test_loopback_is_called_without_a_proxy_and_the_services_default_of_top_k(
    make, scripted, proxy
):
    # The proxy takes no CONNECT: a call that went there would not come back.
    make(retry=RetryPolicy(max_attempts=1))[0].classify(b"photo")
    assert len(scripted.requests) == 1
    make()[0].classify(b"photo")
    assert not scripted.requests[0].HasField("top_k")


def test_several_are_one_call_with_a_result_each(make, scripted):
    scripted.steps = [answering(classified("church"), NOT_AN_IMAGE)]
    first, second = make()[0].classify([b"first", b"second"])
    assert first.get().label == "church"
    assert isinstance(second.error, BadImage)
    assert (second.error.message, second.error.request_id) == ("no image", "r2")
    assert list(scripted.requests[0].images) == [b"first", b"second"]


def test_an_image_of_several_that_cannot_be_read_has_its_error(make, scripted, tmp_path):
    scripted.steps = [answering(classified("church"))]
    bad, good = make()[0].classify([tmp_path / "nowhere.jpg", b"photo"])
    assert isinstance(bad.error, BadImage)
    assert good.get().label == "church"
    assert list(scripted.requests[0].images) == [b"photo"]
    (only,) = make()[0].classify([tmp_path / "nowhere.jpg"])
    assert isinstance(only.error, BadImage)
    assert len(scripted.requests) == 1


def test_a_large_picture_is_shrunk_to_the_side_of_the_constructor(make, scripted):
    file = io.BytesIO()
    Image.effect_noise((600, 800), 50).save(file, "JPEG")
    for options, side in (({}, 512), ({"shrink_to": 64}, 64)):
        make(**options)[0].classify(file.getvalue(), shrink=True)
        (sent,) = scripted.requests[-1].images
        assert min(Image.open(io.BytesIO(sent)).size) == side
        assert scripted.metadata[-1]["x-tandem-shrunk"] == "600x800"
    with pytest.raises(ValueError, match="shrink_to is 0: give 1 px or more"):
        make(shrink_to=0)


def test_every_client_takes_the_same_options_of_a_call():
    kinds: tuple[type, ...] = (Client, AsyncClient, GrpcClient)
    assert len({str(inspect.signature(kind.classify)) for kind in kinds}) == 1  # type: ignore[attr-defined]
    names = [*CallArguments.__annotations__, "regions"]  # which change what is returned
    assert names == [field.name for field in fields(CallOptions)]


@pytest.mark.parametrize("options", [{"top_k": 2**31}, {"top_k": 2.5}, {"model_set": 1}])
def test_a_parameter_that_no_message_carries(make, scripted, options):
    with pytest.raises(BadRequest, match="a parameter cannot be sent"):
        make()[0].classify(b"photo", **options)
    assert not scripted.requests


def test_a_bad_image_alone_is_raised(make, scripted):
    scripted.steps = [answering(NOT_AN_IMAGE)]
    with pytest.raises(BadImage, match="no image"):
        make()[0].classify(b"no")


@cases(
    "code, error_code, kind, status",
    (CODE.INVALID_ARGUMENT, "too_many_bytes", BadImage, 413),
    (CODE.INVALID_ARGUMENT, "bad_parameter", BadRequest, 422),
    (CODE.UNAUTHENTICATED, "unauthorized", Unauthorized, 401),
    (CODE.RESOURCE_EXHAUSTED, "overloaded", Overloaded, 429),
    (CODE.RESOURCE_EXHAUSTED, "rate_limited", Overloaded, 429),
    (CODE.PERMISSION_DENIED, "forbidden", Unauthorized, 403),
    (CODE.UNAVAILABLE, "not_ready", NotReady, 503),
    (CODE.UNAVAILABLE, "of a later version", NotReady, 503),
    (CODE.DEADLINE_EXCEEDED, "deadline", DeadlineExceeded, 504),
    (CODE.INTERNAL, "internal", ServiceError, 500),
    (CODE.RESOURCE_EXHAUSTED, None, Overloaded, 429),
    (CODE.UNIMPLEMENTED, None, ServiceError, 500),
)
def test_errors_have_the_services_words(make, scripted, code, error_code, kind, status):
    told = {"error-code": error_code, "request_id": "r9"} if error_code else {}
    scripted.steps = [failing(code, **told)]
    with pytest.raises(TandemError) as caught:
        make(retry=RetryPolicy(max_attempts=1))[0].classify(b"photo")
    error = caught.value
    assert (type(error), error.message, error.status) == (kind, "what was wrong", status)
    if error_code:
        assert (error.code, error.request_id) == (error_code, "r9")


@cases(
    "error",
    errors.BadParameterError,
    errors.DeadlineError,
    errors.NotReadyError,
    errors.OverloadedError,
    errors.SlowBodyError,
    errors.BodyTooLargeError,
    errors.TooManyFilesError,
    errors.UnauthorizedError,
    errors.UnknownModelError,
    TooManyPixelsError,
    UnsupportedFormatError,
    ids=lambda error: error.code,
)
def test_an_error_has_the_status_that_http_gives_it(make, scripted, error):
    scripted.steps = [failing(code_of(error.status), **{"error-code": error.code})] * 9
    with pytest.raises(TandemError) as caught:
        make()[0].classify(b"photo")
    assert (caught.value.code, caught.value.status) == (error.code, error.status)


def test_what_was_refused_is_asked_again_not_before_the_service_says(make, scripted):
    told = {"error-code": "overloaded", "grpc-retry-pushback-ms": "2000"}
    scripted.steps = [failing(CODE.RESOURCE_EXHAUSTED, **told)] * 2
    client, clock = make()
    assert client.classify(b"photo").label == "tench"
    assert all(2.0 <= wait <= 2.2 for wait in clock.slept)
    assert (len(clock.slept), len(scripted.requests)) == (2, 3)


def test_a_service_that_is_not_there_is_asked_again(free_port):
    clock = SleepingClock()
    with GrpcClient(f"127.0.0.1:{free_port()}", retry=RetryPolicy(max_attempts=3)) as client:
        client._now = clock
        client._sleep = clock.sleep  # type: ignore[assignment]
        with pytest.raises(Unreachable, match="no answer from 127"):
            client.classify(b"photo")
    assert len(clock.slept) == 2


def test_a_degraded_answer_is_one_unless_it_must_not_be(make, scripted):
    scripted.steps = [
        answering(classified() | {"degraded": True, "missing_members": {"b": "late"}})
    ]
    with pytest.raises(Degraded, match=r"without b \(late\)"):
        make(allow_degraded=False)[0].classify(b"photo")


@pytest.mark.parametrize("rows", [[], [classified()] * 2, [classified() | {"predictions": []}]])
def test_what_is_no_answer(make, scripted, rows):
    scripted.steps = [lambda *_: reply(*rows)]
    with pytest.raises(BadAnswer, match="not as Tandem does"):
        make()[0].classify(b"photo")


def test_a_call_names_one_of_several_sets(make, scripted):
    client, _ = make()
    client.classify(b"photo")
    client.classify(b"photo", model_set="other")
    assert [r.HasField("model_set") and r.model_set for r in scripted.requests] == [False, "other"]
    assert [sent.get("model-set") for sent in scripted.metadata] == [None, "other"]
    scripted.steps = [failing(CODE.NOT_FOUND, **{"error-code": "unknown_model"})]
    with pytest.raises(BadRequest) as caught:
        client.classify(b"photo", model_set="nobody")
    assert (caught.value.code, caught.value.status) == ("unknown_model", 404)
