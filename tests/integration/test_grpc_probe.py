"""The real HAProxy, asked on the command's socket whether gRPC calls reach a replica."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from app.grpc.tandem_pb2_grpc import EnsembleServicer, add_EnsembleServicer_to_server
from app.launch.deploy import grpc_reaches
from app.launch.haproxy import HaproxyCommand
from tests.support.haproxy_configs import APPLICATION, write_serves_config
from tests.support.haproxy_process import running


@pytest.fixture
def replica() -> Iterator[int]:
    """The port of a replica's server."""
    server = grpc.server(ThreadPoolExecutor(2))
    add_EnsembleServicer_to_server(EnsembleServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


@contextlib.contextmanager
def haproxy(
    folder: Path, free_port: Callable[[], int], replicas: dict[str, int]
) -> Iterator[HaproxyCommand]:
    ports = (free_port(), free_port())
    config = write_serves_config(
        folder / "haproxy.cfg",
        ports=ports,
        http_port=free_port(),
        grpc_port=free_port(),
        replicas=replicas,
    )
    command = HaproxyCommand(folder / "haproxy", ports)
    command.write()
    with running(command, config):
        channel = grpc.insecure_channel(f"unix:{command.local_grpc_socket}")
        grpc.channel_ready_future(channel).result(20)
        channel.close()
        yield command


@pytest.mark.parametrize("is_there", [False, True])
def test_it_reaches_a_replica_that_haproxy_knows(
    tmp_path: Path, free_port: Callable[[], int], replica: int, is_there: bool
) -> None:
    replicas = {"grpc": replica} if is_there else {}
    with haproxy(tmp_path, free_port, replicas) as command:
        assert grpc_reaches(f"unix:{command.local_grpc_socket}", APPLICATION) == is_there


def test_it_reaches_no_replica_that_does_not_listen(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    with haproxy(tmp_path, free_port, {"grpc": free_port()}) as command:
        assert not grpc_reaches(f"unix:{command.local_grpc_socket}", APPLICATION)


def test_it_reaches_nobody_where_nobody_listens(tmp_path: Path) -> None:
    assert not grpc_reaches(f"unix:{tmp_path / 'none.sock'}", APPLICATION)
