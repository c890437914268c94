"""HAProxy's rules for gRPC clients: what a call has to begin with, and what is refused at once.

A refusal has the form that gRPC calls trailers only: HTTP's status 200, and the call's in headers.
"""

CALL_PATH = "/tandem.v1.Ensemble/Classify"  # tandem.proto's method
INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"  # of the Open Inference Protocol
IS_CALL = f"{{ path {CALL_PATH} {INFER_PATH} }}"
# Every method of the two services: the others' messages are short, and have to come too.
IS_OURS = "{ path_beg /tandem.v1.Ensemble/ /inference.GRPCInferenceService/ }"
# Methods that Serve adds to every application, and that ask for no key; it answers Healthz here.
IS_SERVES = "{ path_beg /grpc.reflection. /ray.serve. } !{ path_end /Healthz }"
# At a time, wherever they are: a connection may have 100 streams, and HAProxy keeps 16 KB of each
# that waits for its first bytes.
MAX_CALLS = 4096
MAX_OF_SERVES = 8  # each may send as much as a message may have
# How each call's message begins: whether it is compressed, and its length (app/grpc/request.py).
TELL_PREFIX = "http-request set-header x-grpc-message-prefix %[req.body,bytes(0,5),hex]"
RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED = 8, 4


def frontend_rules(begin_within_s: int) -> list[str]:
    """Return the rules that come before all others of the frontend.

    Calls under way are counted in a stick table of two rows: our services', and those of Serve's
    own methods. Other applications' are their own affair.
    """
    told = _refusal(RESOURCE_EXHAUSTED, "overloaded", "too many calls at a time; try again in 1 s")
    full = f"http-request return status 200 {told}"
    late = f"headers and message did not begin to arrive within {begin_within_s} s"
    return [
        "stick-table type integer size 16 expire 1h store conn_cur",
        f"http-request track-sc0 int(1) if {IS_OURS}",
        f"http-request track-sc0 int(2) if {IS_SERVES}",
        f"{full} if {IS_OURS} {{ sc0_conn_cur gt {MAX_CALLS} }}",
        f"{full} if {IS_SERVES} {{ sc0_conn_cur gt {MAX_OF_SERVES} }}",
        f"http-error status 408 {_refusal(DEADLINE_EXCEEDED, 'slow_request', late)}",
        "http-after-response set-status 200 if { status 408 }",
        # HAProxy gives an answer without a body no content type, and some clients ask for it.
        "http-after-response set-header content-type application/grpc "
        "if { res.hdr(grpc-status) -m found }",
    ]


def begin_rules(wait: str, condition: str = "") -> list[str]:
    """Return the rules that ``wait`` for a call's first bytes and tell the Gateway of them."""
    return [f"{rule} if {IS_OURS}{condition}" for rule in (wait, TELL_PREFIX)]


def refusal(message: str) -> str:
    """Return the action that answers a call with RESOURCE_EXHAUSTED, and when to come back."""
    return f"http-request return status 200 {_refusal(RESOURCE_EXHAUSTED, 'overloaded', message)}"


def _refusal(status: int, code: str, message: str) -> str:
    told = f'hdr grpc-status {status} hdr grpc-message "{message}" hdr error-code {code}'
    return f"{told} hdr grpc-retry-pushback-ms 1000" if status == RESOURCE_EXHAUSTED else told
