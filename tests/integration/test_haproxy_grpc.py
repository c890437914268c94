"""The real HAProxy, started as Serve starts it, before a gRPC server that remembers metadata."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from app.errors import DEADLINE_METADATA, INTERNAL_HEADERS
from app.grpc.call import timeout_s_of
from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from app.launch.deploy import grpc_reaches
from app.launch.haproxy import HaproxyCommand
from tests.support.haproxy_configs import APPLICATION, write_serves_config
from tests.support.haproxy_process import Gated, running, serving


@pytest.fixture
def servicer() -> Gated:
    return Gated()


@pytest.fixture
def replica(servicer) -> Iterator[int]:
    """The port of a replica's server."""
    with serving(servicer) as port:
        yield port


@contextmanager
def haproxy(
    folder: Path, free_port: Callable[[], int], replicas: dict[str, int], front: int | None = None
) -> Iterator[HaproxyCommand]:
    """Run it at port ``front``; it listens on the command's own socket too."""
    ports = (free_port(), free_port())
    config = write_serves_config(
        folder / "haproxy.cfg",
        ports=ports,
        http_port=free_port(),
        grpc_port=front or free_port(),
        replicas=replicas,
    )
    command = HaproxyCommand(folder / "haproxy", ports)
    command.write()
    with running(command, config):
        with grpc.insecure_channel(f"unix:{command.local_grpc_socket}") as channel:
            grpc.channel_ready_future(channel).result(20)
        yield command


@pytest.fixture
def ensemble(replica, free_port, tmp_path) -> Iterator[EnsembleStub]:
    """A client of the server, through HAProxy."""
    front = free_port()
    with (
        haproxy(tmp_path, free_port, {"grpc": replica}, front),
        grpc.insecure_channel(f"127.0.0.1:{front}") as channel,
    ):
        grpc.channel_ready_future(channel).result(20)
        yield EnsembleStub(channel)


def test_the_clients_deadline_is_copied(ensemble, servicer):
    assert ensemble.Classify(ClassifyRequest(), timeout=7).request_id == "seen"
    assert ensemble.Classify(ClassifyRequest()).request_id == "seen"
    with_one, without = servicer.metadata
    assert DEADLINE_METADATA not in without
    assert 0.9 * 6 < (timeout_s_of(with_one) or 0) < 0.9 * 7.5  # grpcio rounds up
    assert timeout_s_of(without) is None


def test_a_clients_own_internal_metadata_goes_no_further(ensemble, servicer):
    sent = [(name, "999") for name in INTERNAL_HEADERS]
    assert ensemble.Classify(ClassifyRequest(), metadata=sent).request_id == "seen"
    (metadata,) = servicer.metadata
    assert not [name for name in INTERNAL_HEADERS if metadata.get(name) == "999"]


@pytest.mark.parametrize("where", ["known", "unknown", "silent"])
def test_it_reaches_a_replica_that_haproxy_knows_and_that_listens(
    tmp_path, free_port, replica, where
):
    """Asked on the command's own socket, as the command asks before it says that it is ready."""
    replicas = {"known": {"grpc": replica}, "unknown": {}, "silent": {"grpc": free_port()}}[where]
    with haproxy(tmp_path, free_port, replicas) as command:
        is_reached = grpc_reaches(f"unix:{command.local_grpc_socket}", APPLICATION)
    assert is_reached == (where == "known")


def test_it_reaches_nobody_where_nobody_listens(tmp_path):
    assert not grpc_reaches(f"unix:{tmp_path / 'none.sock'}", APPLICATION)
