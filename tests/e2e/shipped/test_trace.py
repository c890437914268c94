"""One trace per request, through the real service, by OTLP to a receiver."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import httpx
import pytest

from tests.support.services.live_service import drawn_photo
from tests.support.services.processes import serve_logs
from tests.support.trace_checks import (
    ROOT,
    batches,
    by_trace,
    check_batches,
    check_whole,
    num_whole,
    one,
    overlap,
)

MEMBERS = ("resnet50", "densenet169")
NUM_REQUESTS = 8
MAX_BURSTS = 20
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@cache
def photo_of(seed: int) -> bytes:
    return drawn_photo(seed)


@pytest.fixture
def send(service_url):
    def send(seed: int = 3, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        photo = photo_of(seed)
        answer = httpx.post(f"{service_url}/v1/classify", content=photo, headers=names, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer

    return send


def trace_of(answer, receiver):
    """Wait for the whole trace of a request that was answered."""
    identity = answer.headers["x-trace-id"]
    receiver.wait_for(lambda spans: num_whole(by_trace(spans).get(identity, ()), MEMBERS) == 1)
    return by_trace(receiver.spans)[identity]


def test_eight_requests_at_a_time(emptied, send):
    """Every trace is whole, links match the batches, members work at the same time."""
    receiver = emptied  # after a request: the first one makes what later ones find
    for _ in range(MAX_BURSTS):  # a fast machine may answer each before the next one comes
        receiver.spans.clear()
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            answers = list(pool.map(send, range(NUM_REQUESTS)))
        receiver.wait_for(lambda spans: num_whole(spans, MEMBERS) == NUM_REQUESTS)
        sizes = [check_batches(receiver.spans, name, NUM_REQUESTS) for name in MEMBERS]
        if max(size for of_member in sizes for size in of_member) > 1:
            break
    traces = by_trace(receiver.spans)
    assert set(traces) == {answer.headers["x-trace-id"] for answer in answers}
    for answer in answers:
        spans = traces[answer.headers["x-trace-id"]]
        root = check_whole(spans)
        assert root.parent_id is None
        assert root.attributes["request_id"] == answer.headers["x-request-id"]
        assert root.attributes["http.response.status_code"] == 200
        asked = root.attributes["tandem.plan"], root.attributes["tandem.members_asked"]
        assert asked == ("full", 2)
        assert root.service == "tandem"
        assert {"host.name", "ray.node_id", "service.instance.id"} <= set(root.resource)
        decode = one(spans, "decode")
        assert (decode.attributes["tandem.width"], decode.attributes["tandem.height"]) == (640, 480)
        both = [(one(spans, f"queue {name}"), one(spans, f"infer {name}")) for name in MEMBERS]
        (wait, run), (other_wait, other_run) = both
        assert wait.start_us <= other_run.end_us  # both were asked at the same time
        assert other_wait.start_us <= run.end_us
    assert max(size for of_member in sizes for size in of_member) > 1
    assert len(batches(receiver.spans)) == sum(map(len, sizes))


def test_the_members_of_one_image_overlap(receiver, send):
    spans = trace_of(send(), receiver)
    first, second = (one(spans, f"infer {name}") for name in MEMBERS)
    assert overlap(first, second)


def test_the_pages_timeline_tells_what_the_trace_tells(receiver, send):
    """The page draws the answer's timings: the same clock readings as the spans."""
    answer = send()
    stages, spans = answer.json()["timings_ms"]["stages"], trace_of(answer, receiver)
    began = one(spans, "read").start_us / 1e3 - stages[0]["start_ms"]
    told = {f"{s['stage']} {s.get('member', '')}".strip(): s for s in stages}
    assert len(told) == len(stages) == 3 + 2 * len(MEMBERS)
    for name, stage in told.items():
        span = one(spans, name)
        assert (span.end_us - span.start_us) / 1e3 == pytest.approx(stage["duration_ms"], abs=0.1)
        assert span.start_us / 1e3 - began == pytest.approx(stage["start_ms"], abs=2)


def test_the_clients_trace_is_continued(receiver, send):
    answer = send(traceparent=f"00-{TRACE}-{SPAN}-01")
    assert answer.headers["x-trace-id"] == TRACE
    assert check_whole(trace_of(answer, receiver)).parent_id == SPAN


def test_a_client_that_does_not_sample_is_not_traced(emptied, send):
    assert "x-trace-id" not in send(traceparent=f"00-{TRACE}-{SPAN}-00").headers
    sampled = send().headers["x-trace-id"]
    emptied.wait_for(lambda spans: num_whole(spans, MEMBERS) == 1)
    assert set(by_trace(emptied.spans)) == {sampled}


@pytest.mark.parametrize(
    "traceparent",
    ["", "00", "00-zz-zz-01", f"00-{'0' * 32}-{SPAN}-01", "x" * 5000, f"ff-{TRACE}-{SPAN}-01"],
)
def test_a_malformed_traceparent_begins_a_new_trace(send, traceparent):
    answer = send(traceparent=traceparent)
    assert len(answer.headers["x-trace-id"]) == 32
    assert answer.headers["x-trace-id"] != TRACE


def test_a_traceparent_that_is_no_text(service_url):
    headers = {b"traceparent": b"\xff\xfe-\x80", b"tracestate": b"\xff"}
    answer = httpx.post(
        f"{service_url}/v1/classify", content=drawn_photo(), headers=headers, timeout=60
    )
    assert answer.status_code == 200, answer.text


def test_a_bad_image_is_traced_with_its_error(service_url, receiver):
    answer = httpx.post(f"{service_url}/v1/classify", content=b"no image", timeout=60)
    assert answer.status_code == 400
    identity = answer.headers["x-trace-id"]
    receiver.wait_for(lambda spans: any(s.name == ROOT for s in by_trace(spans).get(identity, ())))
    spans = by_trace(receiver.spans)[identity]
    assert one(spans, "decode").error
    root = one(spans, ROOT)
    assert root.parent_id is None
    assert root.attributes["http.response.status_code"] == 400


def test_health_checks_leave_no_trace(service_url, emptied):
    for path in ("/healthz", "/readyz"):
        assert httpx.get(service_url + path, timeout=60).status_code == 200
    assert httpx.get(f"{service_url}/v1/models", timeout=60).status_code == 200
    emptied.wait_for(lambda spans: any(s.name == "GET /v1/models" for s in spans))
    assert {span.name for span in emptied.spans} == {"GET /v1/models"}


def test_the_log_is_json_and_has_no_line_for_a_request(service, send):
    (log,) = serve_logs(service.process.pid).glob("replica_tandem_Gateway_*.log")
    before = log.read_text("utf-8")
    for _ in range(5):
        send()
    assert log.read_text("utf-8") == before
    messages = [json.loads(line)["message"] for line in before.splitlines()]
    passed = [message for message in messages if message.startswith("golden check of")]
    assert len(passed) == len(MEMBERS)


def test_a_receiver_that_refuses_costs_no_request(receiver, send):
    receiver.refuses = True
    try:
        before = receiver.num_calls
        send()
        receiver.wait_for(lambda _: receiver.num_calls > before)
        send()
    finally:
        receiver.refuses = False
