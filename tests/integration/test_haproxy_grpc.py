"""The real HAProxy, started as Serve starts it, before a gRPC server that remembers metadata."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from app.errors import DEADLINE_METADATA, INTERNAL_HEADERS
from app.grpc.call import timeout_s_of
from app.grpc.tandem_pb2 import ClassifyReply, ClassifyRequest
from app.grpc.tandem_pb2_grpc import (
    EnsembleServicer,
    EnsembleStub,
    add_EnsembleServicer_to_server,
)
from app.launch.haproxy import HaproxyCommand
from tests.support.haproxy_configs import write_serves_config
from tests.support.haproxy_process import running


class Remembering(EnsembleServicer):
    def __init__(self) -> None:
        self.metadata: list[dict[str, str]] = []

    def Classify(self, request: ClassifyRequest, context: grpc.ServicerContext) -> ClassifyReply:
        self.metadata.append(dict(context.invocation_metadata()))
        return ClassifyReply(request_id="seen")


@pytest.fixture
def servicer() -> Remembering:
    return Remembering()


@pytest.fixture
def ensemble(
    servicer: Remembering, free_port: Callable[[], int], tmp_path: Path
) -> Iterator[EnsembleStub]:
    """A client of the server, through HAProxy."""
    server = grpc.server(ThreadPoolExecutor(2))
    add_EnsembleServicer_to_server(servicer, server)
    front, back = free_port(), server.add_insecure_port("127.0.0.1:0")
    server.start()
    ports = (free_port(), free_port())
    config = write_serves_config(
        tmp_path / "haproxy.cfg",
        ports=ports,
        http_port=free_port(),
        grpc_port=front,
        replicas={"grpc": back},
    )
    command = HaproxyCommand(tmp_path / "haproxy", ports)
    command.write()
    with running(command, config), grpc.insecure_channel(f"127.0.0.1:{front}") as channel:
        grpc.channel_ready_future(channel).result(20)
        yield EnsembleStub(channel)
    server.stop(None).wait()


def test_the_clients_deadline_is_copied(ensemble: EnsembleStub, servicer: Remembering) -> None:
    assert ensemble.Classify(ClassifyRequest(), timeout=7).request_id == "seen"
    assert ensemble.Classify(ClassifyRequest()).request_id == "seen"
    with_one, without = servicer.metadata
    assert DEADLINE_METADATA not in without
    assert 0.9 * 6 < (timeout_s_of(with_one) or 0) < 0.9 * 7.5  # grpcio rounds up
    assert timeout_s_of(without) is None


def test_a_clients_own_internal_metadata_goes_no_further(
    ensemble: EnsembleStub, servicer: Remembering
) -> None:
    sent = [(name, "999") for name in INTERNAL_HEADERS]
    assert ensemble.Classify(ClassifyRequest(), metadata=sent).request_id == "seen"
    (metadata,) = servicer.metadata
    assert not [name for name in INTERNAL_HEADERS if metadata.get(name) == "999"]
