"""Clients that mean harm, in a process of their own: they do not share the good load's event loop.

An attack goes on until it is cancelled, and counts in ``ends`` how its requests ended.
"""

import asyncio
import itertools
import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import grpc
import httpx
import machine  # noqa: F401 (makes tests.support importable)

from app.errors import REFUSED_HEADER
from app.grpc.tandem_pb2 import ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleStub
from tests.support.open_inference import images
from tests.support.services.hostile import CORPUS, Hostile, hang_up, send
from tests.support.slow_clients import KINDS, linger
from tests.support.slow_relay import slow_relay

Ends = Counter[str]
Attack = Callable[[Ends], Coroutine[Any, Any, None]]
GIVE_UP_S, AGAIN_AFTER_S = 60.0, 1.0
MALFORMED_RATE, NUM_CALLERS = 50.0, 32
HEAVY_EVERY = 4  # rounds: more bodies of 19 and 40 MB would measure the copying
NUM_SLOW, NUM_IDLE, NUM_BODIES = 50, 1000, 140  # connections: of each kind, idle, and below
UNREAD = ("/nothing", "/healthz", "/v1/models", "/v2/models/nothing/infer")
BEGUN = ("/v1/classify?top_k=none",)
LARGE_BYTES, NUM_LARGE = 18 * 10**6, 10
# How many bytes of a message's connection pass at once; HAProxy waits for the first 15 KB.
LARGE = {"large": None, "stops half-way": LARGE_BYTES // 2, "does not begin": 5_000}
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
STALLED_METHODS = ("ServerLive", "ModelReady")  # nothing is to be read of the first one
NUM_CONNECTIONS, NUM_CALLS, STALLED_BYTES, SENT_BYTES, EVERY_S = 6, 100, 200_000, 16_000, 8.0
NUM_TRICKLING, NUM_CROWDED, NUM_HEADERS, IDLE_AGAIN_S = 150, 4096, 42, 10.0
PROBE = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
NUM_CROWD, CROWD_MEMBER = 40, "imagenette.resnet50"


def attacks_on(url: str, grpc_port: int, photos: Sequence[bytes]) -> dict[str, Attack]:
    """Return every attack by its name.

    ``malformed``: the hostile corpus, and who hangs up; ``slow``: connections that send next to
    nothing; ``unread`` and ``begun``: bodies byte by byte, to routes that read none, and with a
    wrong parameter; ``large_calls``: gRPC messages of 18 MB that are no images, whole or slow;
    ``stalled_calls``: a hundred calls on each of six connections that let a byte pass now and then;
    ``header``: calls that say that HAProxy had refused 999 requests; ``crowd``: 40 clients that ask
    one member without a pause.
    """
    slow = [(kind, "", NUM_IDLE if kind == "idle" else NUM_SLOW) for kind in KINDS]
    unread = [("late body", path, NUM_BODIES // len(UNREAD)) for path in UNREAD]
    return {
        "malformed": partial(malformed, url),
        "slow": partial(connections, url, slow),
        "unread": partial(connections, url, unread),
        "begun": partial(connections, url, [("late body", BEGUN[0], NUM_BODIES)]),
        "large_calls": partial(large_calls, grpc_port),
        "stalled_calls": partial(stalled_calls, grpc_port),
        "header": partial(false_headers, grpc_port),
        "crowd": partial(crowd, url, photos),
    }


def keyless_attacks_on(url: str, grpc_port: int, photo: bytes) -> dict[str, Attack]:
    """Return the attacks on a service with keys of a caller who has none, by their names.

    ``trickle``: 150 connections that begin a body; ``probes``: 150 that ask /readyz without a
    pause; ``idle``: 4,096 of eight addresses, half of which say nothing and half were answered
    once; ``idle_here``: the same of the good load's own address; ``trailers``: a chunked body whose
    trailers are a key and HAProxy's count of refusals, five times a second; ``headers``: 42
    connections of gRPC, each with 100 calls without a message.
    """
    where = urlsplit(url)
    host, port = str(where.hostname), where.port or 80
    return {
        "trickle": partial(connections, url, [("late body", "", NUM_TRICKLING)]),
        "probes": partial(probes, url),
        "idle": partial(idle, host, port, [f"127.0.0.{number}" for number in range(2, 10)]),
        "idle_here": partial(idle, host, port, ["127.0.0.1"]),
        "trailers": partial(trailers, host, port, photo),
        "headers": partial(headers_alone, host, grpc_port),
    }


async def probes(url: str, ends: Ends) -> None:
    async def client(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(f"{url}/readyz") as answer:
                await answer.read()
            ends[str(answer.status)] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(NUM_TRICKLING)))


async def idle(host: str, port: int, addresses: Sequence[str], ends: Ends) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def client(address: str, sent: bytes) -> None:
        while True:
            started = time.monotonic()
            with suppress(OSError):
                here = (address, 0)
                reader, writer = await asyncio.open_connection(host, port, local_addr=here)
                writer.write(sent)
                with suppress(OSError):
                    while await reader.read(4096):
                        pass
                writer.close()
            ends[f"{len(sent)} bytes: cut after {time.monotonic() - started:.0f} s"] += 1
            await asyncio.sleep(IDLE_AGAIN_S)

    each = [(address, sent) for address in addresses for sent in (b"", PROBE)]
    await asyncio.gather(*(client(*each[n % len(each)]) for n in range(NUM_CROWDED)))


async def trailers(host: str, port: int, photo: bytes, ends: Ends) -> None:
    head = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    said = f"Authorization: Bearer {'k' * 40}\r\n{REFUSED_HEADER}: 999\r\n\r\n".encode()
    while True:
        reader, writer = await asyncio.open_connection(host, port)
        with suppress(OSError):
            writer.write(head + b"%x\r\n%b\r\n0\r\n" % (len(photo), photo) + said)
            ends[(await reader.readline())[9:12].decode()] += 1
        writer.close()
        await asyncio.sleep(0.2)


async def headers_alone(host: str, port: int, ends: Ends) -> None:
    """Write HTTP/2 by hand (RFC 9113, RFC 7541): no client sends headers without a message."""
    fields = {":method": "POST", ":scheme": "http", ":path": "/tandem.v1.Ensemble/Classify"}
    fields |= {":authority": "x", "content-type": "application/grpc", "te": "trailers"}
    block = b"".join(
        b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in field)
        for field in fields.items()
    )

    async def connection() -> None:
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            for number in range(NUM_CALLS):
                head = len(block).to_bytes(3, "big") + b"\1\4" + (2 * number + 1).to_bytes(4, "big")
                writer.write(head + block)
            async with asyncio.timeout(EVERY_S):
                while answer := await reader.read(65536):
                    ends["bytes of answers"] += len(answer)
            writer.close()
        ends["connections"] += 1

    async def again() -> None:
        while True:
            await connection()

    await asyncio.gather(*(again() for _ in range(NUM_HEADERS)))


@contextmanager
def under_attack(attack: Attack) -> Iterator[dict[str, int]]:
    """Attack while the block runs; how the requests ended is in the yielded dict afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()  # no Event: a child that was killed may hold its lock
    process = context.Process(target=_run, args=(attack, theirs), daemon=True)
    process.start()
    theirs.close()
    ends: dict[str, int] = {}
    ours.recv()
    try:
        yield ends
    finally:
        with suppress(OSError, EOFError):  # it was ended as we were
            ours.send("over")
            if ours.poll(2 * GIVE_UP_S):
                ends.update(ours.recv())
        process.kill()
        process.join()


def _run(attack: Attack, pipe: Connection) -> None:
    pipe.send(asyncio.run(_until_over(attack, pipe)))


async def _until_over(attack: Attack, pipe: Connection) -> dict[str, int]:
    ends: Ends = Counter()
    running = asyncio.create_task(attack(ends))
    pipe.send("begun")
    await asyncio.to_thread(pipe.recv)
    running.cancel()
    (error,) = await asyncio.gather(running, return_exceptions=True)
    if not isinstance(error, asyncio.CancelledError):
        raise error
    return dict(ends.most_common())


async def malformed(url: str, ends: Ends) -> None:
    slots = asyncio.Semaphore(2 * NUM_CALLERS)  # a service that is behind is not sent more
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_CALLERS))
    limits = httpx.Limits(max_connections=NUM_CALLERS)
    started = time.monotonic()
    with httpx.Client(base_url=url, timeout=GIVE_UP_S, limits=limits) as client:
        async with asyncio.TaskGroup() as group:
            for number, hostile in enumerate(_endless()):
                due = number / MALFORMED_RATE - (time.monotonic() - started)
                await asyncio.sleep(max(0.0, due))
                await slots.acquire()
                sent = group.create_task(asyncio.to_thread(_one, client, url, hostile, ends))
                sent.add_done_callback(lambda _: slots.release())


def _endless() -> Iterator[Hostile | None]:
    """Yield the corpus in turn; None hangs up half-way."""
    for number in itertools.count():
        for hostile in (None, *CORPUS):
            if hostile is None or not hostile.is_heavy or number % HEAVY_EVERY == 0:
                yield hostile


def _one(client: httpx.Client, url: str, hostile: Hostile | None, ends: Ends) -> None:
    name, documented = (hostile.name, str(hostile.status)) if hostile else ("hang up", "hung up")
    try:
        if hostile:
            status = str(send(client, hostile).status_code)
        else:
            hang_up(url)
            status = "hung up"
    except (httpx.HTTPError, OSError) as error:
        status = type(error).__name__
    ends[status] += 1
    if status != documented:
        ends[f"otherwise than documented: {name}: {status}, not {documented}"] += 1


async def connections(url: str, wanted: Sequence[tuple[str, str, int]], ends: Ends) -> None:
    """Hold so many connections of each kind to each path, again when they are cut."""
    where = urlsplit(url)

    async def client(kind: str, path: str) -> None:
        while True:
            cut = await linger(str(where.hostname), where.port or 80, kind, GIVE_UP_S, path=path)
            ends[f"{kind} {path}: {cut.status} after {cut.after_s:.0f} s"] += 1

    async with asyncio.TaskGroup() as group:
        for kind, path, number in wanted:
            for _ in range(number):
                group.create_task(client(kind, path))


async def large_calls(port: int, ends: Ends) -> None:
    """Copying large messages without a pause would cost this process as much as the service."""
    message = ClassifyRequest(images=[bytes(LARGE_BYTES)])

    async def client(kind: str, num_sent: int | None) -> None:
        while True:
            started = time.monotonic()
            if num_sent is None:
                status = await _call(port, message)
            else:
                async with slow_relay(port, num_sent) as relay:
                    status = await _call(relay.port, message)
            ends[f"{kind}: {status} after {time.monotonic() - started:.0f} s"] += 1
            await asyncio.sleep(AGAIN_AFTER_S)

    async with asyncio.TaskGroup() as group:
        for kind, num_sent in LARGE.items():
            for _ in range(NUM_LARGE):
                group.create_task(client(kind, num_sent))


async def _call(port: int, message: ClassifyRequest, metadata: Any = ()) -> str:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OWN_CONNECTION) as channel:
        try:
            ask = EnsembleStub(channel).Classify
            reply = await ask(message, timeout=GIVE_UP_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            said = dict(error.trailing_metadata() or ()).get("error-code", "nothing said")
            return f"{error.code().name} ({said})"
        return f"OK ({reply.results[0].error.code})"


async def stalled_calls(port: int, ends: Ends) -> None:
    async def calls(channel: grpc.aio.Channel, method: str) -> None:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        while True:
            try:
                await call(bytes(STALLED_BYTES))
                ends["answered"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1
            await asyncio.sleep(AGAIN_AFTER_S)

    async def connection() -> None:
        async with (
            slow_relay(port, NUM_CALLS * SENT_BYTES, EVERY_S) as relay,
            grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}", options=OWN_CONNECTION) as channel,
            asyncio.TaskGroup() as group,
        ):
            for number in range(NUM_CALLS):
                group.create_task(calls(channel, STALLED_METHODS[number % 2]))

    await asyncio.gather(*(connection() for _ in range(NUM_CONNECTIONS)))


async def false_headers(port: int, ends: Ends) -> None:
    """Call five times a second, without an image."""
    while True:
        ends[await _call(port, ClassifyRequest(), ((REFUSED_HEADER, "999"),))] += 1
        await asyncio.sleep(0.2)


async def crowd(url: str, photos: Sequence[bytes], ends: Ends) -> None:
    where = f"{url}/v2/models/{CROWD_MEMBER}/infer"

    async def client(session: aiohttp.ClientSession, photo: bytes) -> None:
        body, headers = images(photo)
        while True:
            async with session.post(where, data=body, headers=headers) as answer:
                await answer.read()
            ends[str(answer.status)] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session, photos[n % len(photos)]) for n in range(NUM_CROWD)))
