"""A gRPC call: its metadata, its status, and its record in trace and metrics."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import unquote

import grpc
from opentelemetry import trace
from opentelemetry.trace import format_trace_id
from ray.serve.grpc_util import RayServegRPCContext

from app.caching.response_cache import CACHE_CONTROL
from app.graph.request import RequestOptions
from app.grpc.request import announced_bytes, timeout_s_of
from app.messages import Fault, logged_fault
from app.metrics.requests import CLIENT_WENT, record_answered
from app.oip.shared_memory import asks_for_itself, is_loopback
from app.queueing.haproxy_headers import REFUSED_HEADER

M = TypeVar("M")
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
        self.metadata, self._sent = dict(sent), sent
        self.authorization = [value for key, value in sent if key == "authorization"]
        known = dict(context.trailing_metadata())  # Serve's request id, from the client or new
        self.request_id = known.get("request_id") or uuid.uuid4().hex

    @property
    def is_local(self) -> bool:
        """Whether the call is known to come from a program on this machine.

        The peer may be HAProxy, which then listens on loopback (:mod:`app.launch.haproxy`).
        """
        return is_loopback_peer(self._context.peer() or "") and asks_for_itself(self.joined)

    @property
    def announced_bytes(self) -> int | None:
        return announced_bytes(self.metadata)

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
        )

    def joined(self, name: str) -> str | None:
        """Return the values of metadata that may be sent several times; None if there is none."""
        values = [value for key, value in self._sent if key == name]
        return ", ".join(values) if values else None

    def refuse(self, fault: Fault) -> None:
        self.status = fault.status
        self._context.set_code(code_of(fault.status))
        self._context.set_details(fault.message)
        self._trailing.append(("error-code", fault.code))
        if fault.status in (429, 503):
            self._trailing.append((RETRY, RETRY_AFTER_MS))

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


async def answered(call: GrpcCall, answer: Callable[[], Awaitable[M]], empty: Callable[[], M]) -> M:
    """Return the reply to a call; after an error it is empty, and the context has the status."""
    try:
        return await answer()
    except asyncio.CancelledError:  # the client hung up, or its deadline passed
        call.status = CLIENT_WENT
        raise
    except Exception as error:
        call.refuse(logged_fault(error, call.request_id))
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
