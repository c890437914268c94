"""The gRPC interface of the real command: answers, errors, deadlines, the client's trace."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from ray.serve._private.haproxy import build_grpc_healthcheck_request_hex

from app.grpc.tandem_pb2 import ClassifyReply, ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from tests.support.cases import cases
from tests.support.services.live_service import drawn_photo
from tests.support.services.processes import descendants, listening, reachable_ports, wait_until
from tests.support.trace_checks import by_trace, check_whole, num_whole

MEMBERS = ("resnet50", "densenet169")
METHOD = "tandem.v1.Ensemble/Classify"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CODE = grpc.StatusCode
Classify = Callable[..., tuple[ClassifyReply, dict[str, str]]]


@pytest.fixture(scope="module")
def channel(service, grpc_port) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        yield channel


@pytest.fixture(scope="module")
def classify(channel) -> Classify:
    """Send images; return the reply and the trailing metadata, or raise grpc.RpcError."""
    ensemble = EnsembleStub(channel)

    def classify(*images: bytes, top_k: int | None = None, timeout: float = 60, **metadata: str):
        request = ClassifyRequest(images=images, top_k=top_k)
        sent = [*metadata.items()]
        reply, call = ensemble.Classify.with_call(request, timeout=timeout, metadata=sent)
        return reply, dict(call.trailing_metadata())

    return classify


def refused(classify, *images, **options):
    with pytest.raises(grpc.RpcError) as caught:
        classify(*images, **options)
    error = caught.value
    return error.code(), error.details(), dict(error.trailing_metadata())


def test_the_service_says_where(service, grpc_port):
    said = f"gRPC: 127.0.0.1:{grpc_port},"  # after "ready at", which the fixture waits for
    wait_until(lambda: said in service.log.read_text(), 60, said)


def test_the_answer_is_that_of_http(service, classify):
    photo = drawn_photo()
    answer = httpx.post(f"{service.url}/v1/classify?top_k=10", content=photo, timeout=60).json()
    reply, _ = classify(photo, top_k=10)
    (result,) = reply.results
    told = MessageToDict(
        result.classified,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    for left_out in (
        "skipped_members",
        "missing_members",
        "asked",
        "answer_set",
        "embedding",
    ):  # JSON
        assert not told.pop(left_out)
    for one in (told, answer):
        stages = [s["stage"] for s in one.pop("timings_ms")["stages"]]
        assert stages == ["read", "decode", *["queue", "infer"] * 2, "combine"]
        assert one.pop("request_id")
    assert told == answer


def test_many_calls_at_a_time(classify):
    photos = [drawn_photo(seed) for seed in range(4)]
    alone = [classify(photo)[0].results[0].classified.predictions[0].label for photo in photos]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda i: classify(photos[i % 4], photos[i % 4])[0], range(32)))
    for number, reply in enumerate(replies):
        labels = {result.classified.predictions[0].label for result in reply.results}
        assert labels == {alone[number % 4]}


@pytest.mark.parametrize("num_bytes", [20 * 2**20 + 1, 21 * 2**20, 81 * 2**20])
def test_too_many_bytes(classify, num_bytes):
    """Received and counted, or only announced: the client is told the same."""
    found, details, trailing = refused(classify, bytes(num_bytes))
    assert found is CODE.INVALID_ARGUMENT
    assert "the limit is 20971520; send smaller ones" in details
    assert trailing["error-code"] == "too_many_bytes"


def test_a_compressed_message_that_is_too_long(service, grpc_port):
    """Nobody knows its length before it is there: grpcio refuses it by its own limit."""
    where, gzip = f"127.0.0.1:{grpc_port}", grpc.Compression.Gzip
    with (
        grpc.insecure_channel(where, compression=gzip) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        EnsembleStub(channel).Classify(ClassifyRequest(images=[bytes(200 * 2**20)]), timeout=60)
    assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
    assert "larger than max" in caught.value.details()


def test_a_time_that_is_too_short(classify):
    images = [drawn_photo()] * 8
    code, details, trailing = refused(classify, *images, **{"x-request-timeout-seconds": "0.001"})
    assert code is CODE.DEADLINE_EXCEEDED
    # It may be over before the message is there, which it counts too.
    says = {"deadline": "no answer within 0.001 s", "slow_body": "had not arrived after 0.001 s"}
    assert says[trailing["error-code"]] in details


def test_a_clients_deadline_that_passes_harms_nobody(classify):
    code, _, _ = refused(classify, *[drawn_photo()] * 64, timeout=0.02)
    assert code is CODE.DEADLINE_EXCEEDED
    assert classify(drawn_photo())[0].results[0].HasField("classified")


def test_the_clients_trace_is_continued(classify, receiver):
    _, trailing = classify(drawn_photo(), traceparent=f"00-{TRACE}-{SPAN}-01", request_id="mine")
    assert trailing["x-trace-id"] == TRACE
    receiver.wait_for(
        lambda spans: num_whole((s for s in spans if s.trace_id == TRACE), MEMBERS, METHOD) == 1
    )
    root = check_whole(by_trace(receiver.spans)[TRACE], METHOD)
    assert (root.parent_id, root.attributes["request_id"]) == (SPAN, "mine")
    assert root.attributes["rpc.response.status_code"] == "OK"


def test_a_client_that_does_not_sample_is_not_traced(classify):
    _, trailing = classify(drawn_photo(), traceparent=f"00-{TRACE}-{SPAN}-00")
    assert "x-trace-id" not in trailing


@cases("traceparent", "", "00", "00-zz-zz-01", f"00-{'0' * 32}-{SPAN}-01", "x" * 5000)
def test_a_malformed_traceparent_begins_a_new_trace(classify, traceparent):
    reply, trailing = classify(drawn_photo(), traceparent=traceparent)
    assert reply.results[0].HasField("classified")
    assert len(trailing["x-trace-id"]) == 32
    assert trailing["x-trace-id"] != TRACE


def test_a_traceparent_that_is_no_text(service, grpc_port, receiver):
    """By hand, since grpcio's client refuses it: Serve's health check, sent to our method."""
    call = bytes.fromhex(build_grpc_healthcheck_request_hex(f"/{METHOD}"))
    start = call.index(b"\x00\x07:method") - 9  # the frame's head: 3 bytes of length, 6 more
    end = start + 9 + int.from_bytes(call[start : start + 3], "big")
    header = b"\x00\x0btraceparent\x04\xff\xfe-\x80\x00\x0arequest_id\x03raw"

    def roots():
        return [s for s in receiver.spans if s.attributes.get("request_id") == "raw"]

    frame = (end - start - 9 + len(header)).to_bytes(3, "big") + call[start + 3 : end] + header
    with socket.create_connection(("127.0.0.1", grpc_port), 60) as connection:
        connection.sendall(call[:start] + frame + call[end:])
        receiver.wait_for(lambda _: bool(roots()))
    (root,) = roots()
    assert root.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"  # no image


def test_reflection_tells_what_there_is(channel):
    assert "tandem.v1.Ensemble" in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_everything_listens_on_loopback_alone(service):
    assert len(listening(descendants(service.process.pid))) > 10
    assert reachable_ports(service.process.pid) == set()
