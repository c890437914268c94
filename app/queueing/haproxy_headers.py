"""The headers by which the Gateway and HAProxy tell each other who is refused, and what is asked.

The Gateway's refusals say how many requests it lets be under way at present, and HAProxy refuses
what comes beyond by itself (:mod:`app.launch.haproxy.refusals`). Of those it counts, the next
request that it sends on says how many they were.

A client's time is moved to a header of our own, out of Serve's sight: past it Serve would answer in
plain text, before the Gateway if that is late because the machine is busy.
"""

LIMIT_HEADER = "x-tandem-limit"  # in an answer; HAProxy takes it out
CLOSE_HEADER = "x-tandem-close"  # in an answer that did not wait for the body's end; the same
REFUSED_HEADER = "x-tandem-refused"  # in a request, as all that follow
TIMEOUT_COPY = "x-tandem-timeout-seconds"
DEADLINE_METADATA = "x-grpc-timeout"  # gRPC's own header for it is not handed on
# What a gRPC message begins with on the wire, in hexadecimal: whether it is compressed (1 byte),
# and its length (4). grpcio keeps that to itself too, until the message is there.
PREFIX_METADATA = "x-grpc-message-prefix"
# HAProxy takes a client's own out of its request, over HTTP and gRPC.
INTERNAL_HEADERS = (
    LIMIT_HEADER,
    CLOSE_HEADER,
    REFUSED_HEADER,
    TIMEOUT_COPY,
    DEADLINE_METADATA,
    PREFIX_METADATA,
)
# That one header may say: without HAProxy a client could send it, and it counts as demand.
MAX_REFUSED = 1000


def refused_before(text: str) -> int:
    """Return how many requests HAProxy says it refused; 0 for what is no number."""
    if not (text.isascii() and text.isdigit()):
        return 0
    return int(text) if len(text) < 4 else MAX_REFUSED
