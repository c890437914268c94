"""Real receivers of traces on this machine: OTLP by gRPC and HTTP, Jaeger's agent and collector."""

import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from app.telemetry.export import let_jaeger_import
from tests.support.http_server import QuietRequest, ThreadedServer

let_jaeger_import()
from opentelemetry.exporter.jaeger.thrift.gen.agent import Agent  # noqa: E402
from opentelemetry.exporter.jaeger.thrift.gen.jaeger import ttypes  # noqa: E402
from thrift.protocol import TBinaryProtocol, TCompactProtocol  # noqa: E402
from thrift.transport import TTransport  # noqa: E402


@dataclass(frozen=True)
class Received:
    """A span as it came over the wire, whatever the protocol."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_us: int
    end_us: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    service: str
    resource: dict[str, Any] = field(default_factory=dict)
    # OTLP alone is read for these.
    kind: int = 0  # OTLP's number
    scope: str = ""  # the instrumentation scope
    error: str = ""  # why the work failed, if it did


class Inbox:
    def __init__(self) -> None:
        self.spans: list[Received] = []

    def wait_for(self, enough: Callable[[list[Received]], bool], within_s: float = 300) -> None:
        deadline = time.monotonic() + within_s
        while not enough(list(self.spans)):
            assert time.monotonic() < deadline, f"only {[s.name for s in self.spans]} arrived"
            time.sleep(0.05)


class OtlpGrpc(Inbox, trace_service_pb2_grpc.TraceServiceServicer):
    """OpenTelemetry's TraceService; ``refuses`` answers UNAVAILABLE."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False
        self.num_calls = 0
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.num_calls += 1
        if self.refuses:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
        self.spans += list(otlp_spans(request))
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


class OtlpHttp(Inbox, ThreadedServer):
    """OTLP over HTTP, protobuf bodies."""

    def __init__(self) -> None:
        Inbox.__init__(self)
        self.paths: list[str] = []
        inbox = self

        class Request(QuietRequest):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                inbox.paths.append(self.path)
                request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                inbox.spans += list(otlp_spans(request))
                self.send(200, b"", content_type="application/x-protobuf")

        ThreadedServer.__init__(self, Request)


class JaegerCollector(Inbox, ThreadedServer):
    """Jaeger's collector: a Batch in Thrift's binary protocol; answers ``status``."""

    def __init__(self) -> None:
        Inbox.__init__(self)
        self.status = 202
        self.paths: list[str] = []
        inbox = self

        class Request(QuietRequest):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                inbox.paths.append(self.path)
                batch = ttypes.Batch()
                batch.read(TBinaryProtocol.TBinaryProtocol(TTransport.TMemoryBuffer(body)))
                if inbox.status < 300:
                    inbox.spans += list(jaeger_spans(batch))
                self.send(inbox.status, b"")

        ThreadedServer.__init__(self, Request)


class JaegerAgent(Inbox):
    """Jaeger's agent: emitBatch in Thrift's compact protocol, one UDP packet each."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: list[int] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(0.1)
        self.url = f"udp://127.0.0.1:{self._socket.getsockname()[1]}"
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def _listen(self) -> None:
        while not self._is_done.is_set():
            try:
                packet = self._socket.recv(65535)
            except TimeoutError:
                continue
            self.packets.append(len(packet))
            protocol = TCompactProtocol.TCompactProtocol(TTransport.TMemoryBuffer(packet))
            name, _, _ = protocol.readMessageBegin()
            assert name == "emitBatch"
            arguments = Agent.emitBatch_args()
            arguments.read(protocol)
            self.spans += list(jaeger_spans(arguments.batch))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()
        self._socket.close()


def otlp_spans(request: Any) -> Iterable[Received]:
    for group in request.resource_spans:
        resource = {a.key: _value(a.value) for a in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Received(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex() or None,
                    span.start_time_unix_nano // 1000,
                    span.end_time_unix_nano // 1000,
                    {a.key: _value(a.value) for a in span.attributes},
                    tuple((li.trace_id.hex(), li.span_id.hex()) for li in span.links),
                    str(resource["service.name"]),
                    resource,
                    span.kind,
                    scope.scope.name,
                    span.status.message,
                )


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def jaeger_spans(batch: Any) -> Iterable[Received]:
    for span in batch.spans:
        yield Received(
            span.operationName,
            f"{span.traceIdHigh % 2**64:016x}{span.traceIdLow % 2**64:016x}",
            f"{span.spanId % 2**64:016x}",
            f"{span.parentSpanId % 2**64:016x}" if span.parentSpanId else None,
            span.startTime,
            span.startTime + span.duration,
            {t.key: t.vStr or t.vLong or t.vDouble or t.vBool for t in span.tags or ()},
            tuple(
                (
                    f"{r.traceIdHigh % 2**64:016x}{r.traceIdLow % 2**64:016x}",
                    f"{r.spanId % 2**64:016x}",
                )
                for r in span.references or ()
            ),
            batch.process.serviceName,
        )
