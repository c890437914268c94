"""Edits of HAProxy's rules for gRPC calls: checks of their beginning, and refusals.

A refusal is a trailers-only response: HTTP status 200, with the call's status in headers.
"""

from app.launch.haproxy import edits
from app.launch.haproxy.answers import BEGIN_WITHIN_S
from app.launch.haproxy.edit import Edit, appended
from app.launch.haproxy.refusals import REFUSAL, refusals, stick_table, under_way
from app.queueing.haproxy_headers import DEADLINE_METADATA, PREFIX_METADATA

CALL_PATH = "/tandem.v1.Ensemble/Classify"  # the method of tandem.proto
INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"  # of the Open Inference Protocol
IS_CALL = f"{{ path {CALL_PATH} {INFER_PATH} }}"
# Every method of our services. Messages of the others are short, but must arrive too.
IS_OURS = (
    "{ path_beg /tandem.v1.Ensemble/ /inference.GRPCInferenceService/ /grpc.health.v1.Health/ }"
)
# Methods that Serve adds to all applications, and that need no key. HAProxy answers Healthz here.
IS_REFLECTION, IS_SERVES = "{ path_beg /grpc.reflection. }", "{ path_beg /ray.serve. }"
IS_HEALTHZ = "{ path_end /Healthz }"
# The limit of calls under way in all places: a connection may have 100 streams, and HAProxy buffers
# 16 KB for each that waits for its first bytes.
MAX_CALLS = 4096
MAX_OF_SERVES = 8  # each may be as large as a message may be
# Serve's contexts do not show the deadline that a gRPC client sets.
COPY_DEADLINE = (
    f"http-request set-header {DEADLINE_METADATA} %[req.hdr(grpc-timeout)] "
    "if { req.hdr(grpc-timeout) -m found }"
)
# The first bytes of each message: the compression flag and the length (app/grpc/request.py).
TELL_PREFIX = f"http-request set-header {PREFIX_METADATA} %[req.body,bytes(0,5),hex] if {IS_OURS}"
RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED = 8, 4
FRONTEND = "frontend grpc_frontend"
BIND = (
    r"^ *bind \{\{ config\.grpc_frontend_host \}\}:\{\{ config\.grpc_frontend_port \}\} proto h2$"
)


def of_frontend() -> Edit:
    """Return the edits for all applications: slow headers, and calls that Serve answers for all."""
    rules = [
        stick_table(),
        _late(),
        "http-after-response set-status 200 if { status 408 }",
        # HAProxy sends no content type with an empty response, but some clients require one.
        "http-after-response set-header content-type application/grpc "
        "if { res.hdr(grpc-status) -m found }",
        *_few(4, f"{IS_SERVES} !{IS_HEALTHZ}", MAX_OF_SERVES),
    ]
    return appended("the limits of gRPC connections", FRONTEND, rules, per=f"^{FRONTEND}$")


def of_calls(section: str, max_requests: int | None) -> list[Edit]:
    """Return HAProxy's rules for our application's calls; ``section`` is its backend.

    They copy a client's deadline to metadata that the Gateway can read. ``max_requests`` is the
    limit of requests under way per Gateway, as over HTTP.
    """
    name = section.removeprefix("backend ")
    limits = [
        stick_table(),
        _late(),
        # Serve returns request_id as metadata; grpcio answers INTERNAL if it is not valid there.
        *edits.removals(("request_id",)),
        COPY_DEADLINE,
        *_few(2, IS_OURS, MAX_CALLS),
        *_few(3, IS_REFLECTION, MAX_OF_SERVES),
    ]
    begins = [f"{edits.FIRST_BYTES} if {IS_OURS}", TELL_PREFIX]
    if max_requests is not None:
        limits += refusals(name, max_requests, IS_CALL, _refusal(REFUSAL))
        begins += under_way(name, IS_CALL)
    return [
        edits.of_backend("the limits of gRPC calls", section, limits),
        edits.of_backend("the time limit of a call's beginning", section, begins),
    ]


def _few(row: int, calls: str, num: int) -> list[str]:
    """Return rules that count ``calls`` under way, and refuse calls beyond ``num``.

    ``row`` is the row of the table in which they are counted.
    """
    full = _refusal("too many calls at a time; try again in 1 s")
    return [
        f"http-request track-sc0 int({row}) if {calls}",
        f"{full} if {calls} {{ sc0_conn_cur gt {num} }}",
    ]


def _refusal(message: str) -> str:
    """Return an action that answers RESOURCE_EXHAUSTED and when to try again."""
    headers = _headers(RESOURCE_EXHAUSTED, "overloaded", message)
    return f"http-request return status 200 {headers} hdr grpc-retry-pushback-ms 1000"


def _late() -> str:
    late = f"headers and message did not begin to arrive within {BEGIN_WITHIN_S} s"
    return f"http-error status 408 {_headers(DEADLINE_EXCEEDED, 'slow_request', late)}"


def _headers(status: int, code: str, message: str) -> str:
    return f'hdr grpc-status {status} hdr grpc-message "{message}" hdr error-code {code}'
