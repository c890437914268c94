"""One service with serve_config.yaml, gRPC and a receiver of traces, for all tests of this folder.

It has shared memory and pages of all origins besides. A service with the file as it is:
test_stopping.py.
"""

import signal
import uuid

import httpx
import pytest

from tests.support.services.live_service import Service, drawn_photo, traced_config
from tests.support.services.processes import wait_until
from tests.support.services.stopping import lent
from tests.support.trace_receivers import OtlpGrpc


@pytest.fixture(scope="package")
def receiver():
    """Where the service sends its spans."""
    with OtlpGrpc() as receiver:
        yield receiver


@pytest.fixture(scope="package")
def grpc_port(free_port) -> int:
    return free_port()


@pytest.fixture(scope="package")
def service(start_process, tmp_path_factory, receiver, grpc_port):
    """The running service that the tests share."""
    config = traced_config(tmp_path_factory.mktemp("config"), receiver.url)
    started = start_process("--config", str(config), "--grpc-port", str(grpc_port))
    with lent(started, signal.SIGINT, is_for_all=True) as shared:
        # Serve does not continue the client's trace in the first moments of a replica.
        wait_until(lambda: continues_traces(shared), 120, "a trace that is continued")
        yield shared


@pytest.fixture(scope="package")
def service_url(service) -> str:
    return service.url


def continues_traces(service: Service) -> bool:
    trace_id = uuid.uuid4().hex
    headers = {"traceparent": f"00-{trace_id}-{'1' * 16}-01"}
    answer = httpx.get(f"{service.url}/v1/models", headers=headers, timeout=60)
    return answer.headers.get("x-trace-id") == trace_id


@pytest.fixture
def wait_for_spans(service, receiver):
    """Wait until the spans of all that was asked so far have arrived.

    They leave the service in the order in which they ended: a request made now has the last ones.
    """

    def wait_for_spans() -> None:
        trace_id, span_id = uuid.uuid4().hex, "1" * 16
        answer = httpx.post(
            f"{service.url}/v1/classify",
            content=drawn_photo(),
            headers={"traceparent": f"00-{trace_id}-{span_id}-01"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        receiver.wait_for(
            lambda spans: any((s.trace_id, s.parent_id) == (trace_id, span_id) for s in spans)
        )

    return wait_for_spans


@pytest.fixture
def emptied(receiver, wait_for_spans) -> OtlpGrpc:
    """The receiver without the spans of earlier tests, of which none comes any more."""
    wait_for_spans()
    receiver.spans.clear()
    return receiver
