"""A gRPC call: its metadata and message with HTTP's limits, its status, its trace and metrics.

:func:`add_servicer` registers the services so that a call begins before its message. On the wire, a
call with one request message equals a call with a stream of them. A method registered for streams
is called when the headers are there, and receives the message itself. So the key, admission and the
byte budget are checked first. Until a message is received it stays with the client, except for one
flow control window (HTTP/2).
"""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cache
from math import ceil
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage
from opentelemetry import trace
from opentelemetry.trace import format_trace_id
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from app.access import ANYONE, Keys
from app.answers import Fault, logged_fault
from app.changes import Sender, is_loopback
from app.errors import (
    ADDRESS_HEADER,
    DEADLINE_METADATA,
    GATEWAYS_HEADER,
    PREFIX_METADATA,
    REFUSED_HEADER,
    BadParameterError,
    BodyTooLargeError,
    RateLimitedError,
    TooManyFilesError,
)
from app.graph.request import (
    CACHE_CONTROL,
    TIMEOUT_HEADER,
    NormalForm,
    RequestOptions,
    parse_timeout_s,
)
from app.grpc import open_inference_pb2, tensorflow_serving_pb2
from app.grpc import tandem_pb2 as messages
from app.telemetry.metrics import CLIENT_WENT, record_answered
from app.telemetry.spans import continued, continues_traces

AnswerMessage = TypeVar("AnswerMessage")
ParsedMessage = TypeVar("ParsedMessage", bound=ProtobufMessage)
SERVICE = messages.DESCRIPTOR.services_by_name["Ensemble"].full_name
METHOD = "Classify"
_OPEN_INFERENCE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
OPEN_INFERENCE = _OPEN_INFERENCE.full_name
OPEN_INFERENCE_METHODS = [*_OPEN_INFERENCE.methods_by_name]
_TENSORFLOW = tensorflow_serving_pb2.DESCRIPTOR.services_by_name.values()
TENSORFLOW_METHODS = {name: each.full_name for each in _TENSORFLOW for name in each.methods_by_name}
HEALTH, CHECK = "grpc.health.v1.Health", "Check"
TRACE_ID = "x-trace-id"
STATUS = "rpc.response.status_code"  # OpenTelemetry's conventions for RPC
# Clients with a retry policy wait this long (gRPC proposal A6), as with HTTP's Retry-After.
RETRY, RETRY_AFTER_MS = "grpc-retry-pushback-ms", "1000"
# 413 is not RESOURCE_EXHAUSTED, which clients retry: the same bytes would be too many again.
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
OK = 200
MODEL_SET = "model-set"  # names the set before the message is read, for the call's place
DEADLINE_FORM = re.compile(r"(\d{1,8})([HMSmun])")
PREFIX_FORM = re.compile(r"00([0-9A-Fa-f]{8})")
UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# The client's clock started when it sent the request, and the answer has to travel.
SHARE_OF_DEADLINE = 0.9
MAX_FIELDS = 2**12  # in a message; counting them takes the event loop up to 8 ms
# Types of values in protobuf's encoding, and the bytes of those that have a fixed number.
VARINT, OF_A_LENGTH, SIZES = 0, 2, {1: 8, 5: 4}
LONGEST_SHIFT = 63  # a number has ten bytes at most


@cache
def normal_form() -> NormalForm[str]:
    """Return the form of metadata, with the secret that this process has."""
    return NormalForm(str)


has_own_traces = cache(continues_traces)  # once for all calls of this process


class GrpcCall:
    """A gRPC call, from its arrival to :meth:`ended`.

    Errors are set on the context, not raised: Serve would log each with its traceback, and drop the
    trailing metadata.
    """

    def __init__(self, service: str, method: str, context: RayServegRPCContext) -> None:
        self._service, self._method, self._context = service, method, context
        self._started = time.perf_counter()
        self._trailing: list[tuple[str, str]] = []
        self.status = OK  # as an HTTP status, like everywhere in the application
        sent = [(k, v) for k, v in context.invocation_metadata() if isinstance(v, str)]
        self._sent, self.authorization = normal_form().of(sent)
        self.metadata = dict(reversed(self._sent))  # of repeated ones the first, as over HTTP
        self.announced_bytes = announced_bytes(self.metadata)
        self.caller = ANYONE
        self._keys: Keys | None = None  # once they were asked
        known = dict(context.trailing_metadata())  # Serve's request id, from the client or new
        self.request_id = known.get("request_id") or uuid.uuid4().hex

    @property
    def sender(self) -> Sender:
        """Who calls. Without the host, which only pages make differ: they cannot speak gRPC."""
        return Sender(is_loopback_peer(self._context.peer() or ""), self.joined)

    def check(self, keys: Keys) -> None:
        """Find out whose call it is; raises as :meth:`Keys.check` and :meth:`Keys.take` do."""
        address = self.metadata.get(ADDRESS_HEADER, "")
        self.caller = keys.check(self.authorization, address, self.joined("x-forwarded-for") or "")
        self._keys = keys
        keys.take(self.caller, self.metadata.get(GATEWAYS_HEADER, ""))

    def options(self, traffic_header: str | None = None) -> RequestOptions:
        """Return the options in the metadata.

        ``traffic_header`` is the name of the metadata by which a version is chosen; None: by image.
        """
        return RequestOptions(
            self.request_id,
            timeout_s=timeout_s_of(self.metadata),
            priority=self.metadata.get("priority"),
            refused_before=self.metadata.get(REFUSED_HEADER),
            cache_control=self.joined(CACHE_CONTROL),
            model_set=self.metadata.get(MODEL_SET),
            traffic_key=self.metadata.get(traffic_header) if traffic_header else None,
            caller=self.caller,
        )

    def joined(self, name: str) -> str | None:
        """Return the values of metadata that may be sent several times; None if there is none."""
        values = [value for key, value in self._sent if key == name]
        return ", ".join(values) if values else None

    def refuse(self, fault: Fault, retry_after_ms: str = RETRY_AFTER_MS) -> None:
        self.status = fault.status
        self._context.set_code(code_of(fault.status))
        self._context.set_details(fault.message)
        self._trailing.append(("error-code", fault.code))
        if fault.status in (429, 503):
            self._trailing.append((RETRY, retry_after_ms))

    def ended(self) -> None:
        """Finish the request's span and metrics, and send the client the trace id."""
        span = trace.get_current_span()
        if span.is_recording():
            span.update_name(f"{self._service}/{self._method}")
            # Serve writes its own rpc.* attributes later; its rpc.grpc.status_code is OK for every
            # call that does not raise.
            span.set_attribute(STATUS, code_of(self.status).name)
            trace_id = format_trace_id(span.get_span_context().trace_id)
            self._trailing.append((TRACE_ID, trace_id))
        self._context.set_trailing_metadata(self._trailing)
        duration_ms = (time.perf_counter() - self._started) * 1e3
        record_answered(f"/{self._service}/{self._method}", self.status, duration_ms)
        if self._keys is not None:
            self._keys.ended(self.caller, self.status)


async def answered(
    call: GrpcCall,
    answer: Callable[[], Awaitable[AnswerMessage]],
    empty: Callable[[], AnswerMessage],
) -> AnswerMessage:
    """Return the reply to a call; after an error it is empty, and the context has the status."""
    if has_own_traces():
        with continued(call.metadata):
            return await _answered(call, answer, empty)
    return await _answered(call, answer, empty)


async def _answered(
    call: GrpcCall,
    answer: Callable[[], Awaitable[AnswerMessage]],
    empty: Callable[[], AnswerMessage],
) -> AnswerMessage:
    try:
        return await answer()
    except asyncio.CancelledError:  # the client hung up, or its deadline passed
        call.status = CLIENT_WENT
        raise
    except Exception as error:
        fault = logged_fault(error, call.request_id)
        if isinstance(error, RateLimitedError):
            call.refuse(fault, str(ceil(error.retry_after_s * 1e3)))
        else:
            call.refuse(fault)
    finally:
        call.ended()
    return empty()


def code_of(status: int) -> grpc.StatusCode:
    """Return the gRPC status for an HTTP status; INTERNAL for unknown ones."""
    return grpc.StatusCode.OK if status == OK else CODES.get(status, grpc.StatusCode.INTERNAL)


def number_of(status: int) -> int:
    """Return the number of :func:`code_of`'s status on the wire."""
    return int(code_of(status).value[0])


def is_loopback_peer(peer: str) -> bool:
    """Whether a peer address in gRPC's form is on this machine."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return False
    address, _, _ = unquote(rest).rpartition(":")
    return is_loopback(address.removeprefix("[").removesuffix("]"))


def announced_bytes(metadata: Mapping[str, str]) -> int | None:
    """Return the length of the message that is still to come.

    None if the length is unknown, or if the message is compressed and may become any length.
    """
    prefix = PREFIX_FORM.fullmatch(metadata.get(PREFIX_METADATA, ""))
    return int(prefix[1], 16) if prefix else None


def parsed(message: bytes, kind: type[ParsedMessage]) -> ParsedMessage:
    """Parse a message of a ``kind``.

    Raises :class:`BadParameterError` if it does not parse, or has over ``MAX_FIELDS`` fields.
    """
    with suppress(IndexError):  # it is cut, and does not parse
        FieldCounter(message).count(0, len(message), kind.DESCRIPTOR)
    request: ParsedMessage = kind()
    try:
        request.ParseFromString(message)
    except DecodeError as error:
        raise BadParameterError(
            f"these {len(message)} bytes are no {kind.DESCRIPTOR.full_name}; make the client from "
            f"{kind.DESCRIPTOR.file.name}"
        ) from error
    return request


class FieldCounter:
    """Counts a message's fields, of messages in it too, without parsing it.

    An empty field has two bytes, and takes up to 90 once it is parsed: 20 MiB would take 900.
    Packed numbers count too: each may be a byte, and takes 8.
    """

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._num_left = MAX_FIELDS

    def count(self, at: int, end: int, kind: Descriptor) -> None:
        """Count the fields from ``at`` to ``end``, which are those of a message of a ``kind``.

        Raises:
            BadParameterError: there are too many.
            IndexError: the message is cut.
        """
        while at < end:
            self._take(1)
            tag, at = self._number(at)
            size, field = SIZES.get(tag & 7, 0), kind.fields_by_number.get(tag >> 3)
            if tag & 7 == VARINT:
                _, at = self._number(at)
            elif tag & 7 == OF_A_LENGTH:
                size, at = self._number(at)
                if field is not None and field.message_type is not None:
                    self.count(at, min(at + size, end), field.message_type)
                elif field is not None and field.cpp_type != field.CPPTYPE_STRING:
                    self._take(min(size, end - at))
            at += size

    def _take(self, num: int) -> None:
        self._num_left -= num
        if self._num_left < 0:
            raise BadParameterError(
                f"the message has over {MAX_FIELDS} fields, which is the limit; send tensors "
                "as bytes (raw_input_contents, tensor_content), or fewer images"
            )

    def _number(self, at: int) -> tuple[int, int]:
        """Return the number at ``at``, in protobuf's form, and where the next value begins."""
        number = shift = 0
        while True:
            byte = self._message[at]
            number |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80 or shift > LONGEST_SHIFT:
                return number, at


def images_of(
    request: messages.ClassifyRequest, max_files: int, max_body_bytes: int
) -> list[bytes]:
    """Return the images' bytes, in order.

    Raises :class:`TandemError` if there are no images, too many of them, or too many bytes.
    """
    if not request.images:
        raise BadParameterError("the request has no image; put its bytes into images")
    if len(request.images) > max_files:
        raise TooManyFilesError(
            f"the request has {len(request.images)} images, the limit is {max_files}; "
            "send them in several requests"
        )
    images = [bytes(image) for image in request.images]
    size = sum(map(len, images))
    if size > max_body_bytes:
        raise BodyTooLargeError(
            f"the images have {size} bytes, the limit is {max_body_bytes}; "
            "send smaller ones (1,000 pixels a side are plenty) or fewer per request"
        )
    return images


def timeout_s_of(metadata: Mapping[str, str]) -> float | None:
    """Return the client's time limit in s, or None; raise if it is not a number above 0."""
    seconds = []
    if (header := metadata.get(TIMEOUT_HEADER)) is not None:
        seconds.append(parse_timeout_s(header))
    if deadline := DEADLINE_FORM.fullmatch(metadata.get(DEADLINE_METADATA, "")):
        seconds.append(SHARE_OF_DEADLINE * int(deadline[1]) * UNIT_S[deadline[2]])
    return min(seconds, default=None)


class Message:
    """A message's bytes, which :meth:`take` hands over once.

    grpcio keeps a stream's last message in a reference cycle until the garbage collector runs. That
    could be dozens of messages of many MB. So grpcio keeps only this object.
    """

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Callable[[bytes], "Message"], tuple[bytes]]:
        return Message, (self._data,)  # Serve's own proxy sends it to the replica

    def take(self) -> bytes:
        """Return the bytes and drop the reference to them."""
        data, self._data = self._data, b""
        return data


def stream_method(interface: str, name: str) -> Callable[..., Awaitable[Any]]:
    """Return a method of the ingress, which calls ``name`` of its attribute ``interface``."""

    async def answer(
        self: object, incoming: gRPCInputStream[Message], grpc_context: RayServegRPCContext
    ) -> Any:
        return await getattr(self, interface).call(name, incoming, grpc_context)

    answer.__name__ = name
    return answer


def add_servicer(servicer: Any, server: Any) -> None:
    """Add all services as the generated functions do, but without receiving the messages.

    Messages are passed on unparsed, so that an invalid one gets an answer too. Serve calls this
    (``grpc_servicer_functions``) with its own servicer, and with servers that replace the
    servicer's methods by Serve's handlers.
    """
    services = {SERVICE: [METHOD], OPEN_INFERENCE: OPEN_INFERENCE_METHODS, HEALTH: [CHECK]}
    for method, service in TENSORFLOW_METHODS.items():
        services.setdefault(service, []).append(method)
    for service, methods in services.items():
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(getattr(servicer, name), Message)
            for name in methods
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
