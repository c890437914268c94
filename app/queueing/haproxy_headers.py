"""Headers that the Gateway and HAProxy exchange: limits, refusals, deadlines and health.

A refusal of the Gateway carries its present limit of requests. HAProxy then refuses further
requests itself (app/launch/haproxy_cfg), and counts them. The next request that it
passes on carries that count.

HAProxy moves a client's time limit to a header of our own that Serve does not know. Otherwise Serve
would answer a late request in plain text, before the Gateway does.
"""

LIMIT_HEADER = "x-tandem-limit"  # in an answer; HAProxy removes it
CLOSE_HEADER = "x-tandem-close"  # in an answer sent before the body's end; HAProxy removes it
REFUSED_HEADER = "x-tandem-refused"  # in a request, as the headers below
TIMEOUT_COPY = "x-tandem-timeout-seconds"
DEADLINE_METADATA = "x-grpc-timeout"  # grpcio does not pass on gRPC's own header
# The prefix of a gRPC message on the wire, in hexadecimal: whether it is compressed (1 byte), and
# its length (4 bytes). grpcio does not show it before the whole message has arrived.
PREFIX_METADATA = "x-grpc-message-prefix"
# HAProxy removes these headers from a client's request, over HTTP and gRPC.
INTERNAL_HEADERS = (
    LIMIT_HEADER,
    CLOSE_HEADER,
    REFUSED_HEADER,
    TIMEOUT_COPY,
    DEADLINE_METADATA,
    PREFIX_METADATA,
)
# The largest count in one header: without HAProxy a client could send it, and it counts as demand.
MAX_REFUSED = 1000


def refused_before(text: str) -> int:
    """Return how many requests HAProxy refused, by its header; 0 if that is not a number."""
    if not (text.isascii() and text.isdigit()):
        return 0
    return int(text) if len(text) < 4 else MAX_REFUSED
