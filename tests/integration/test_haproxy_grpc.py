"""The real HAProxy, started as Serve starts it, before a gRPC server that remembers metadata."""

import asyncio
import socket
from contextlib import contextmanager, suppress

import grpc
import pytest

from app.access import Keys
from app.environment import HAPROXY_SECRET
from app.errors import DEADLINE_METADATA, INTERNAL_HEADERS, REFUSED_HEADER, SECRET_HEADER
from app.grpc.call import METHOD, OPEN_INFERENCE, SERVICE, timeout_s_of
from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from app.launch.deploy import grpc_reaches
from app.launch.haproxy import HaproxyCommand
from tests.support.cases import cases
from tests.support.haproxy_configs import APPLICATION, write_serves_config
from tests.support.haproxy_process import Gated, running, serving
from tests.support.slow_clients import HeadersAlone

KEY = "a-key-of-these-tests-0123456789"


@pytest.fixture
def servicer() -> Gated:
    return Gated()


@pytest.fixture
def replica(servicer):
    """The port of a replica's server."""
    with serving(servicer) as port:
        yield port


@contextmanager
def haproxy(folder, free_port, replicas, front=None, keys=None):
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
    command.write(keys=keys)
    with running(command, config):
        with grpc.insecure_channel(f"unix:{command.local_grpc_socket}") as channel:
            grpc.channel_ready_future(channel).result(20)
        yield command


@pytest.fixture
def ensemble(replica, free_port, tmp_path):
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


def test_haproxy_shows_the_secret_of_its_environment(tmp_path, free_port, replica, servicer):
    front = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HAPROXY_SECRET, "of-the-run")
        with (
            haproxy(tmp_path, free_port, {"grpc": replica}, front),
            grpc.insecure_channel(f"127.0.0.1:{front}") as channel,
        ):
            sent = [(SECRET_HEADER, "a client's")]
            EnsembleStub(channel).Classify(ClassifyRequest(), metadata=sent, timeout=20)
    (metadata,) = servicer.metadata
    assert metadata[SECRET_HEADER] == "of-the-run"


def test_a_clients_trailers_are_no_metadata(tmp_path, free_port, replica, servicer):
    front = free_port()
    path, kind = f"/{SERVICE}/{METHOD}", "application/grpc"
    names = {":method": "POST", ":scheme": "http", ":authority": "x", ":path": path}
    names |= {"content-type": kind, "te": "trailers"}
    trailers = {"authorization": "Bearer key", REFUSED_HEADER: "999"}
    with haproxy(tmp_path, free_port, {"grpc": replica}, front):
        for port in (front, replica):
            with socket.create_connection(("127.0.0.1", port), 20) as connection:
                connection.sendall(
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                    + frame(SETTINGS, 0, b"", stream=0)
                    + frame(HEADERS, END_HEADERS, block(names))
                    + frame(DATA, 0, bytes(5))  # a message of no bytes
                    + frame(HEADERS, END_HEADERS | END_STREAM, block(trailers))
                )
                assert servicer.arrived.acquire(timeout=20)
    assert len(servicer.metadata) == 2
    assert not [name for metadata in servicer.metadata for name in trailers if name in metadata]


DATA, HEADERS, SETTINGS, END_STREAM, END_HEADERS = 0, 1, 4, 1, 4  # RFC 9113


def frame(kind, flags, payload, stream=1):
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def block(headers):
    """Return headers in HPACK's plainest form, without its tables."""
    pairs = ((name.encode(), value.encode()) for name, value in headers.items())
    return b"".join(b"\0%c%b%c%b" % (len(n), n, len(v), v) for n, v in pairs)


@cases("sent", (), (f"Bearer {KEY}x",), (f"Bearer {KEY}", f"Bearer {KEY}"), (f"Basic {KEY}",))
def test_without_an_accepted_key_no_call_reaches_the_gateway(
    tmp_path, free_port, replica, servicer, sent
):
    with (
        haproxy(tmp_path, free_port, {"grpc": replica}, front := free_port(), Keys([KEY])),
        grpc.insecure_channel(f"127.0.0.1:{front}") as channel,
    ):
        ask = EnsembleStub(channel).Classify
        with pytest.raises(grpc.RpcError) as refused:
            ask(ClassifyRequest(), metadata=[("authorization", words) for words in sent])
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        says = ("requires an API key", "none of this service's keys", "send one header")[len(sent)]
        assert says in refused.value.details()
        assert not servicer.metadata
        metadata = [("authorization", f"bearer {KEY}")]
        assert ask(ClassifyRequest(), metadata=metadata).request_id == "seen"
        for open_to_all in ("grpc.health.v1.Health/Check", f"{OPEN_INFERENCE}/ServerLive"):
            with pytest.raises(grpc.RpcError) as told:  # by the server, which has them not
                channel.unary_unary(f"/{open_to_all}")(b"")
            assert told.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.slow  # 3 s; the rules' other rooms are in make test
async def test_silent_connections_of_this_machine_give_way_to_a_call_with_a_key(
    tmp_path, free_port, replica, monkeypatch
):
    """Also beside those that begin anew as soon as they are cut."""
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "128")  # 24 of gRPC

    async def silent(front):
        while True:
            with suppress(OSError):
                mine = await HeadersAlone.connected(front)
                try:
                    while not mine.is_closed:
                        await asyncio.sleep(0.05)
                finally:
                    mine.close()

    with haproxy(tmp_path, free_port, {"grpc": replica}, front := free_port(), Keys([KEY])):
        crowd = [asyncio.create_task(silent(front)) for _ in range(30)]
        await asyncio.sleep(0.5)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front}") as channel:
            metadata = (("authorization", f"bearer {KEY}"),)
            ask = EnsembleStub(channel).Classify
            answer = await ask(
                ClassifyRequest(), metadata=metadata, timeout=20, wait_for_ready=True
            )
        assert answer.request_id == "seen"
        assert not any(each.done() for each in crowd)
        for each in crowd:
            each.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


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
