"""The real HAProxy, started as Serve starts it, with few of Serve's lines beside our rules."""

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from app.grpc.tandem_pb2 import ClassifyReply, ClassifyRequest
from app.grpc.tandem_pb2_grpc import EnsembleServicer, add_EnsembleServicer_to_server
from app.launch.checks import free_port
from app.launch.haproxy import HaproxyCommand
from app.launch.haproxy_rules import RuleOptions

MAX_REQUESTS = 12
ORIGIN = "https://shop.example"  # of pages that may read its answers
OPTIONS = RuleOptions(max_requests=MAX_REQUESTS, origins=(ORIGIN,))
# What matters of Serve's own (haproxy_templates.py). Without health checks: servers would have to
# answer them.
CONFIG = """\
global
    tune.bufsize 65536
defaults
    mode http
    timeout connect 5s
    timeout client 10s
    timeout server 10s
    option abortonclose
    option redispatch 1
    retries 1
    retry-on conn-failure
    option idle-close-on-response
frontend prometheus
    bind :{metrics}
listen stats
    bind *:{stats}
"""
HTTP = """\
frontend http_frontend
    bind 127.0.0.1:{front}
    acl is_http-other path_beg /other/
    acl is_http-tandem path_beg /
    use_backend http-other if is_http-other
    use_backend http-tandem if is_http-tandem
backend default_backend
    http-request return status 404
backend http-other
    http-reuse always
    server one 127.0.0.1:{back}
backend http-tandem
    http-reuse always
    server one 127.0.0.1:{back}
"""


@contextmanager
def haproxy_before(front, back, folder, options=OPTIONS, sections=HTTP, *, is_cluster=False):
    """Run it at port ``front``; both applications' servers are at port ``back``."""
    ports = (free_port(), free_port())
    config = folder / "haproxy.cfg"
    text = CONFIG.format(metrics=ports[0], stats=ports[1]) + sections
    config.write_text(text.format(front=front, back=back), "ascii")
    command = HaproxyCommand(folder / "haproxy", None if is_cluster else ports)
    command.write(options)
    with running(command, config):
        yield


@contextmanager
def running(command: HaproxyCommand, config: Path) -> Iterator[None]:
    process = subprocess.Popen([command.path, "-db", "-f", config])
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


class Gated(EnsembleServicer):
    """Answers when the gate is open; counts calls, and remembers their metadata."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, str]] = []
        self.gate, self.arrived = threading.Event(), threading.Semaphore(0)
        self.gate.set()

    def Classify(self, request: ClassifyRequest, context: grpc.ServicerContext) -> ClassifyReply:
        self.metadata.append(dict(context.invocation_metadata()))
        self.arrived.release()
        self.gate.wait(20)
        return ClassifyReply(request_id="seen")


@contextmanager
def serving(servicer, num_threads=2, handlers=()):
    """Serve while the block runs; yield the port of loopback."""
    server = grpc.server(ThreadPoolExecutor(num_threads), handlers=handlers)
    add_EnsembleServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    servicer.gate.set()
    server.stop(None).wait()
