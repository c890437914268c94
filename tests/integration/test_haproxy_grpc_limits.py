"""The real HAProxy before a gRPC server: what it refuses itself, and what it tells the Gateway."""

import asyncio
from collections import Counter
from contextlib import suppress

import grpc
import pytest

from app.errors import GATEWAYS_HEADER, PREFIX_METADATA
from app.grpc.call import METHOD, OPEN_INFERENCE, SERVICE, announced_bytes
from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from app.launch.haproxy_rules import FOLDER, RuleOptions
from tests.support.haproxy_process import HTTP, MAX_REQUESTS, Gated, haproxy_before, serving
from tests.support.services.processes import EVENTUALLY_S
from tests.support.slow_clients import HeadersAlone
from tests.support.slow_relay import slow_relay

OTHER, REFLECTION = "/other.Service/Chat", "/grpc.reflection.v1.ServerReflection/Chat"
OURS = {"application": "tandem"}
TO_TANDEM = [*OURS.items()]
OF_ONE, MAX_OF_REFLECTION = 15, 64  # of one address are a quarter of all
MAX_CALLS = 4 * OF_ONE
NUM_CONNECTIONS = 24  # of one address, a quarter of gRPC's, which has 3 in 16
OPTIONS = RuleOptions(max_requests=MAX_REQUESTS, begin_within_s=1, max_calls=MAX_CALLS)
CODE = grpc.StatusCode
# What matters of Serve's own (haproxy_templates.py), with one application and with several.
GRPC = """\
frontend grpc_frontend
    bind 127.0.0.1:{front} proto h2
    acl is_grpc-tandem req.hdr(application) -m str tandem
    use_backend grpc-tandem if is_grpc-tandem
    default_backend DEFAULT
backend default_grpc_backend
    http-request return status 200 hdr grpc-status 5
backend grpc-tandem
    server one 127.0.0.1:{back} proto h2
"""


@pytest.fixture
def gateway() -> Gated:
    return Gated()


# make test: with one application
SEVERAL = pytest.param("default_grpc_backend", marks=pytest.mark.slow, id="several")


@pytest.fixture(params=[pytest.param("grpc-tandem", id="one"), SEVERAL])
def port(gateway, request, free_port, tmp_path, monkeypatch):
    """HAProxy's; the Gateway behind it takes twelve calls, and a message begins within a second."""
    echo = grpc.stream_stream_rpc_method_handler(lambda messages, _: messages)
    handlers = [
        grpc.method_handlers_generic_handler(service, {method: echo})
        for service, method in (path.strip("/").split("/") for path in (OTHER, REFLECTION))
    ]
    front = free_port()
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", str(NUM_CONNECTIONS * 4 * 16 // 3))
    with serving(gateway, 2 * MAX_OF_REFLECTION, handlers) as back:
        of_http = HTTP.format(front=free_port(), back=back)
        sections = of_http + GRPC.replace("DEFAULT", request.param)
        with haproxy_before(front, back, tmp_path, OPTIONS, sections):
            with grpc.insecure_channel(f"127.0.0.1:{front}") as channel:
                grpc.channel_ready_future(channel).result(20)
            yield front


def test_the_length_of_a_message_is_told_whatever_the_client_says(port, gateway):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        classify = EnsembleStub(channel).Classify
        sizes = (0, 5, 300_000)
        for size in sizes:
            own = [*TO_TANDEM, (PREFIX_METADATA, "0000000001")]
            classify(ClassifyRequest(images=[bytes(size)]), metadata=own, timeout=20)
        request, gzip = ClassifyRequest(images=[bytes(300_000)]), grpc.Compression.Gzip
        classify(request, metadata=own, compression=gzip, timeout=20)
    told = [announced_bytes(metadata) for metadata in gateway.metadata]
    lengths = [ClassifyRequest(images=[bytes(size)]).ByteSize() for size in sizes]
    assert told == [*lengths, None]  # a compressed one may come to anything


def test_each_of_several_gateways_is_told_how_many_answer(gateway, free_port, tmp_path):
    front, more = free_port(), "    server two 127.0.0.1:{back} proto h2\n"
    with serving(gateway) as back:
        sections = HTTP.format(front=free_port(), back=back) + GRPC + more
        sections = sections.replace("DEFAULT", "grpc-tandem")
        with (
            haproxy_before(front, back, tmp_path, OPTIONS, sections),
            grpc.insecure_channel(f"127.0.0.1:{front}") as channel,
        ):
            grpc.channel_ready_future(channel).result(20)
            own = [*TO_TANDEM, (GATEWAYS_HEADER, "999")]
            EnsembleStub(channel).Classify(ClassifyRequest(), metadata=own, timeout=20)
    assert gateway.metadata[0][GATEWAYS_HEADER] == "2"


async def test_what_is_too_much_is_refused_before_its_message_is_there(port, gateway):
    """One in 100 ms goes on to the Gateway, which knows more."""
    gateway.gate.clear()
    refused: list[grpc.RpcError] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        classify = EnsembleStub(channel).Classify
        taken = [classify(ClassifyRequest(), metadata=TO_TANDEM) for _ in range(MAX_REQUESTS)]
        for _ in taken:
            await asyncio.to_thread(gateway.arrived.acquire, timeout=20)
        async with asyncio.timeout(EVENTUALLY_S):
            while len(refused) < 4:
                calls = (_half_a_message(port, 100_000, timeout=2) for _ in range(8))
                refused += filter(_is_refused, await asyncio.gather(*calls))
        gateway.gate.set()
        await asyncio.gather(*taken)
    for error in refused:
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert error.details().startswith(f"{MAX_REQUESTS} requests are under way")
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"


def _is_refused(error: grpc.RpcError) -> bool:
    return dict(error.trailing_metadata()).get("error-code") == "overloaded"


async def _half_a_message(port: int, num_sent: int, timeout: float) -> grpc.aio.AioRpcError:
    """Send so much of a message, then next to nothing; return how the call ended."""
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        slow_relay(port, num_sent) as relay,
        grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}", options=own_connection) as channel,
    ):
        request = ClassifyRequest(images=[bytes(2**22)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await EnsembleStub(channel).Classify(request, metadata=TO_TANDEM, timeout=timeout)
        return caught.value


async def test_a_message_that_does_not_begin_never_reaches_the_gateway(port, gateway):
    error = await _half_a_message(port, 5_000, timeout=20)
    assert error.code() is CODE.DEADLINE_EXCEEDED
    assert "did not begin to arrive" in error.details()
    assert dict(error.trailing_metadata())["error-code"] == "slow_request"
    assert gateway.metadata == []


async def test_reflection_has_few_calls_at_a_time(port):
    """Each may send a message without a key. Classify and other applications do not mind."""
    assert await _beside_open_chats(port, REFLECTION) is CODE.RESOURCE_EXHAUSTED
    assert await _beside_open_chats(port, OTHER) is CODE.OK


async def _beside_open_chats(port: int, path: str) -> grpc.StatusCode:
    """Return how one more call of a method ended beside as many as reflection's may have."""
    never = asyncio.Event()

    async def chat():
        yield b"hello"
        await never.wait()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        open_chat = channel.stream_stream(path)
        chats = [open_chat(chat(), metadata=TO_TANDEM) for _ in range(MAX_OF_REFLECTION)]
        for call in chats:
            assert await call.read() == b"hello"
        try:
            await channel.unary_unary(path)(b"", metadata=TO_TANDEM)
            code = CODE.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
        await EnsembleStub(channel).Classify(ClassifyRequest(), metadata=TO_TANDEM, timeout=20)
        for call in chats:
            call.cancel()
    return code


async def test_calls_that_do_not_begin_are_counted_too(port, gateway):
    """OF_ONE at a time have a buffer of HAProxy's each for long, the others for 100 ms."""
    calls = (_half_a_message(port, 5_000, timeout=20) for _ in range(OF_ONE + 3))
    codes = [dict(e.trailing_metadata())["error-code"] for e in await asyncio.gather(*calls)]
    assert Counter(codes) == {"slow_request": OF_ONE, "overloaded": 3}
    assert gateway.metadata == []


CLASSIFY, LIVE = f"/{SERVICE}/{METHOD}", f"/{OPEN_INFERENCE}/ServerLive"


@pytest.fixture
async def connections(port):
    """Return a function that opens connections from an address, whose calls have headers alone."""
    opened: list[HeadersAlone] = []

    async def connect(num=1, source="127.0.0.1"):
        new = [await HeadersAlone.connected(port, source) for _ in range(num)]
        opened.extend(new)
        return new

    yield connect
    for each in opened:
        each.close()


async def _until(condition, what):
    async with asyncio.timeout(EVENTUALLY_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", [CLASSIFY, LIVE])
async def test_headers_alone_give_way_to_calls_whose_messages_come(port, connections, path):
    """300 were held before, and as many as MAX_CALLS kept every other call away."""
    floods = await connections(3)
    for each in floods:
        each.begin(path, 100, **OURS)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(10):
            await EnsembleStub(channel).Classify(ClassifyRequest(), metadata=TO_TANDEM, timeout=20)
            with pytest.raises(grpc.aio.AioRpcError) as told:  # by the server, which has it not
                await channel.unary_unary(LIVE)(b"", metadata=TO_TANDEM, timeout=20)
            assert told.value.code() is CODE.UNIMPLEMENTED
    await _until(lambda: sum(len(each.answered) for each in floods) == 300, "all are answered")


async def test_headers_alone_hurry_no_other_address(connections, gateway):
    (flood,) = await connections(source="127.0.0.2")
    flood.begin(CLASSIFY, 100, **OURS)
    await _until(lambda: len(flood.answered) >= 100 - OF_ONE, "it has no more than its share")
    (slow,) = await connections()
    (stream,) = slow.begin(CLASSIFY, **OURS)
    await asyncio.sleep(0.3)  # three times what a further one of the other address has
    slow.send(stream)
    await _until(lambda: slow.answered, "it is answered")
    assert len(gateway.metadata) == 1


async def test_an_address_has_a_quarter_of_the_connections(connections):
    many: list[HeadersAlone] = []
    for _ in range(NUM_CONNECTIONS + 5):
        with suppress(ConnectionError):  # HAProxy closes it at once
            many += await connections(1, "127.0.0.2")
    for each in many:
        each.send(*each.begin(CLASSIFY, **OURS))
    await _until(lambda: all(each.answered or each.is_closed for each in many), "each has an end")
    assert len([each for each in many if each.answered]) == NUM_CONNECTIONS
    (other,) = await connections()
    other.send(*other.begin(CLASSIFY, **OURS))
    await _until(lambda: other.answered, "another address is answered")


async def test_the_last_quarter_is_for_addresses_with_few(connections, gateway):
    async def opened(source):
        with suppress(ConnectionError):
            (new,) = await connections(1, source)
            new.send(*new.begin(CLASSIFY, **OURS))
            await _until(lambda: new.answered or new.is_closed, "it has an end")
            return bool(new.answered)
        return False

    for last in range(2, 6):
        had = [await opened(f"127.0.0.{last}") for _ in range(NUM_CONNECTIONS)]
        assert all(had) is (last < 5), last
    assert await opened("127.0.0.6")


async def test_calls_that_need_no_key_have_a_rate(connections, gateway):
    (many,) = await connections()
    for num in (100, 200, 300, 400):
        for stream in many.begin(LIVE, 100, **OURS):
            many.send(stream)
        await _until(lambda num=num: len(many.answered) == num, "they are answered")
    refusals = [head for head in many.answered.values() if b"200 calls without a key" in head]
    assert len(refusals) > 50
    (classifying,) = await connections()
    classifying.send(*classifying.begin(CLASSIFY, **OURS))
    await _until(lambda: classifying.answered, "it is answered")
    assert len(gateway.metadata) == 1


@pytest.mark.slow  # 2 s; reflection's calls, which may be held too, are in make test
async def test_headers_alone_hold_the_places_of_serves_methods_for_2_s(connections):
    (flood,) = await connections()
    flood.begin("/ray.serve.RayServeAPIService/ListApplications", 10)
    await _until(lambda: len(flood.answered) == 2, "those beyond 8 are refused")
    await _until(lambda: len(flood.answered) == 10, "the others end")


def test_the_path_is_the_methods():
    assert f" /{SERVICE}/{METHOD} " in (FOLDER / "grpc_backend.cfg").read_text()
