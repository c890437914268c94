"""Replicas as Serve runs them: a process's set-up, the stages' deployments, and hubs.

The set-up also changes the gRPC servers that Serve makes: address, read-ahead and reflection.
Unread bytes should stay with the client, and messages have a size limit. By default grpcio lets a
client send 4 MB ahead on a fast connection, since it estimates the bandwidth-delay product (BDP).
Without the estimate it is 64 KiB, HTTP/2's own window. A message that is being received is let in
whole. Serve takes the options from :data:`app.serve.ray_compatibility.GRPC_OPTIONS`, in replicas
after the ingress has been made.
"""

import asyncio
import gc
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import wraps
from typing import Any, TypeVar

import ray
from ray import serve

from app.access import Caller
from app.answers import Decoded, MemberAnswer
from app.environment import (
    PREPARE_PROXY,
    PROXY_CALLBACK,
    environment_value,
    mark_own_lines,
    write_to_stderr_as_to_files,
)
from app.errors import UPDATING, OtherSetError
from app.grpc.interface import max_message_bytes
from app.queueing.admission import Usage
from app.queueing.fairness import CALLER
from app.serve.channels import IS_THERE, ChannelServer, address_of
from app.serve.ray_compatibility import GRPC_OPTIONS, LOOPBACK, REFLECTION, check_ray
from app.serve.shared_calls import (
    CLASSIFIED,
    DECODED,
    MessageError,
    Question,
    SharedCall,
    read_call,
)
from app.settings import Settings
from app.stages.classifier import Classifier
from app.stages.combiner import Combiner
from app.stages.decoder import Decoder
from app.telemetry.export import pipeline, start_metrics
from app.telemetry.spans import continue_below
from models.errors import TandemError

# The garbage collector runs after this many new objects. Python's default, 700, is reached by a few
# requests under way, so that it would check them again and again.
YOUNG_OBJECTS = 5_000
A = TypeVar("A")
logger = logging.getLogger("ray.serve")
ALL_INTERFACES = "[::]:"
BDP_PROBE = "grpc.http2.bdp_probe"
MAX_RECEIVE = "grpc.max_receive_message_length"
OF_SERVE, OF_PROXIES = "serve", "SERVE_PROXY_ACTOR"  # Serve's namespace, and in its proxies' names
PROXIES_WITHIN_S = 5.0


def start_replica(settings: Settings, *, is_ingress: bool = False) -> None:
    """Set up a replica's process: log, loopback, tracing and metrics."""
    mark_own_lines()
    write_to_stderr_as_to_files()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    keep_to_loopback()
    if is_ingress:
        drop_trailers()
        drop_trailers_in_proxies()
        limit_unread(max_message_bytes(settings.max_body_bytes))
    pipeline.start(settings, is_ingress=is_ingress)
    start_metrics(has_key_names=settings.key_names_in_metrics)


class StageReplica:
    """The base class of a stage that is a deployment of its own."""

    usage: Usage

    def __init__(self, settings: Settings, *args: Any) -> None:
        start_replica(settings)
        super().__init__(settings, *args)  # type: ignore[call-arg]  # the stage's, next in the MRO

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return statistics for the autoscaling policy; Serve calls this if the stage scales."""
        return self.usage.figures()


class SharedStageReplica(StageReplica):
    """A stage with calls that many requests share; Gateways on its node call it over a channel.

    ``answer_many`` takes the message of a call and returns that of its answer.
    """

    answer_many: Callable[..., Awaitable[bytes]]

    def __init__(self, settings: Settings, *args: Any) -> None:
        super().__init__(settings, *args)
        self._wants_channel = settings.local_channels and IS_THERE
        self._channel: ChannelServer | None = None
        # Serve, which does not see calls of a channel, awaits this before it ends the process. Set
        # on the object, where Serve finds it and the garbage collector, which checks classes, does
        # not.
        self.__del__ = self._drain

    async def check_health(self) -> None:
        """Raise if this replica does not work; the first call begins to listen."""
        if self._wants_channel and self._channel is None:
            await self._listen()
        await super().check_health()  # type: ignore[misc]  # the stage's

    async def _listen(self) -> None:
        replica = serve.get_replica_context()
        address = address_of(replica.app_name, replica.deployment, replica.replica_id.unique_id)
        channel = ChannelServer(address, self.answer_many)
        try:
            await channel.start()
        except OSError as error:  # the next check tries again
            logger.warning("cannot open a channel, so calls go through Ray: %s", error)
        else:
            self._channel = channel

    async def _drain(self) -> None:
        if self._channel is not None:
            await self._channel.drain()


async def decode_many(decoder: Decoder, message: bytes) -> bytes:
    """Decode the files of many requests; refuse a large picture in a call shared with others."""
    call = _call_of(message)

    async def decode(question: Question) -> Decoded:
        files, left_s = list(question.files), question.left_s
        regions = {"regions": question.regions} if question.regions else {}
        return await decoder.decode(files, left_s, call.lane, takes_heavy=call.is_alone, **regions)

    return DECODED.pack(await _each(call, decode), decoder.calls_at_once)


async def classify_many(member: Classifier, message: bytes) -> bytes:
    """Classify the images of many requests with a member."""
    call = _call_of(message)

    async def classify(question: Question) -> MemberAnswer:
        if question.images is None:
            raise OtherSetError(f"a member was sent files; {UPDATING}")
        asks = {"has_features": True} if question.has_features else {}
        return await member.classify(question.images, question.left_s, call.lane, **asks)

    return CLASSIFIED.pack(await _each(call, classify), member.calls_at_once)


def _call_of(message: bytes) -> SharedCall:
    try:
        return read_call(message)
    except MessageError as error:
        raise OtherSetError(f"{error}; {UPDATING}") from error


async def _each(
    call: SharedCall, answer: Callable[[Question], Awaitable[A]]
) -> list[A | BaseException]:
    """Return each part's answer or error; cancelling the call cancels all parts."""

    async def part(question: Question) -> A:
        continue_below(question.span)  # in the part's own context, as the next line
        name, share, has_key = question.caller
        CALLER.set(Caller(name, share, has_key=has_key))
        return await answer(question)

    answers = await asyncio.gather(*map(part, call.questions), return_exceptions=True)
    for error in answers:
        if isinstance(error, Exception) and not isinstance(error, TandemError):
            logger.error("a part of a call failed: %r", error, exc_info=error)
    return answers


class DecoderReplica(SharedStageReplica, Decoder):
    """The Decoder as a deployment."""

    async def decode_many(self, message: bytes) -> bytes:
        return await decode_many(self, message)

    answer_many = decode_many


class ClassifierReplica(SharedStageReplica, Classifier):
    """One member as a deployment."""

    async def classify_many(self, message: bytes) -> bytes:
        return await classify_many(self, message)

    answer_many = classify_many


class CombinerReplica(StageReplica, Combiner):
    """The Combiner as a deployment."""


class Hub:
    """The deployments ``Feedback``, ``Samples``, ``Traffic`` and ``Sets``: a book for all Gateways.

    Each has one replica, and only where the settings need it. Requests do not pass through it:
    while it is down, Gateways serve as before. A new replica starts with ``book`` as it was bound.
    """

    def __init__(self, settings: Settings, book: object) -> None:
        start_replica(settings)
        self._book = book

    async def ask(self, method: str, *arguments: object) -> Any:
        """Return the answer of a method of the book."""
        return getattr(self._book, method)(*arguments)


def prepare_proxy() -> list[Any]:
    """Prepare a proxy's process before it listens; return an empty list of HTTP middlewares.

    Serve also calls it in replicas of the ingress (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``).
    """
    drop_trailers()
    limit_unread()
    keep_to_loopback()
    limit_reflection()
    return []


def drop_trailers() -> None:
    """Let uvicorn's servers of this process keep trailers of a chunked body out of the headers.

    Its faster protocol adds both to one list, and often before the application reads it. So a
    trailer would pass what HAProxy removes of headers. The other protocol (h11) drops trailers. An
    uvicorn without these names ends the replica's start.
    """
    _dropping()(None)


def _dropping() -> Callable[[object], None]:
    """Return what does it; it names nothing of this module, which other processes may lack."""

    def drop(_: object) -> None:
        from functools import wraps
        from importlib.util import find_spec

        if find_spec("httptools") is None:
            return
        from uvicorn.protocols.http import httptools_impl

        protocols: Any = httptools_impl.HttpToolsProtocol
        complete = protocols.on_headers_complete
        if hasattr(complete, "__wrapped__"):
            return

        @wraps(complete)
        def complete_with_own_list(protocol: Any) -> None:
            protocol.scope["headers"] = protocol.headers.copy()
            complete(protocol)

        protocols.on_headers_complete = complete_with_own_list

    return drop


def drop_trailers_in_proxies() -> None:
    """Let Serve's own proxies do so too, unless :func:`prepare_proxy` has prepared them.

    Without ``tandem serve`` they start before this program is known, and hand a request's headers
    on to replicas. One that starts later, on a new node, learns it from the next Gateway's start.
    """
    if not ray.is_initialized() or environment_value(PROXY_CALLBACK) == PREPARE_PROXY:
        return
    try:
        asked: list[Future[None]] = [
            ray.get_actor(actor["name"], OF_SERVE).__ray_call__.remote(_dropping()).future()
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == OF_SERVE and OF_PROXIES in actor["name"]
        ]
        for future in asked:
            future.result(PROXIES_WITHIN_S)
    except (AttributeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        text = "Serve's own proxies may take trailers of a body for headers: %s"
        logger.warning(text, str(error).partition("\n")[0])


def limit_reflection() -> None:
    """Let gRPC servers made from now on answer both versions of reflection, with our limits."""
    if not REFLECTION.fits():
        return
    from ray.serve._private import grpc_util

    from app.grpc.interface import add_reflection  # Ray 2.59 does not install grpcio's own

    enable = grpc_util.enable_server_reflection
    if hasattr(enable, "__wrapped__"):
        return

    @wraps(enable)
    def enable_ours(server: Any) -> None:
        names = grpc_util.get_service_names(server.generic_rpc_handlers)
        add_reflection(server, {name for name in names if not name.startswith("ray.serve.")})

    grpc_util.enable_server_reflection = enable_ours


def limit_unread(max_message_bytes: int | None = None) -> None:
    """Let gRPC servers made from now on read ahead no more than HTTP/2's own window.

    It has no effect if the installed Ray passes options to its servers in another way.
    ``max_message_bytes`` limits a message; None: RAY_SERVE_GRPC_MAX_MESSAGE_SIZE does.
    """
    if not GRPC_OPTIONS.fits():
        return
    _set(BDP_PROBE, 0)
    if max_message_bytes is not None:
        _set(MAX_RECEIVE, max_message_bytes)


def _set(name: str, value: int) -> None:
    from ray.serve._private import grpc_util

    options: list[tuple[str, int]] = grpc_util.DEFAULT_GRPC_SERVER_OPTIONS  # type: ignore[attr-defined]
    options[:] = [option for option in options if option[0] != name]
    options.append((name, value))


def keep_to_loopback() -> None:
    """Let gRPC servers of this process listen on 127.0.0.1 if the node's address is loopback.

    Serve binds them to all interfaces, without an option: the server of each replica that answers
    gRPC clients behind HAProxy, the fallback proxy's, and the one by which replicas call each
    other, which unpickles messages of whoever has Ray's token.

    Raises:
        ConfigError: the installed Ray or grpcio cannot be changed in this way.
    """
    check_ray((LOOPBACK,))
    if not ray.is_initialized():
        return
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if ipaddress.ip_address(address).is_loopback:
        # The class that grpc.aio.server() returns, and the base class of Serve's own.
        from grpc.aio._server import Server

        for name in ("add_insecure_port", "add_secure_port"):  # the second with RAY_USE_TLS
            if not hasattr(getattr(Server, name), "__wrapped__"):
                setattr(Server, name, _on_loopback(getattr(Server, name)))


def _on_loopback(add_port: Callable[..., int]) -> Callable[..., int]:
    @wraps(add_port)
    def add(server: Any, address: str, *credentials: Any) -> int:
        if address.startswith(ALL_INTERFACES):
            address = "127.0.0.1:" + address.removeprefix(ALL_INTERFACES)
        return int(add_port(server, address, *credentials))

    return add
