"""The errors of serving, each with its HTTP status and code, and the headers shared with HAProxy.

:mod:`models.errors` has the base class, and the errors of images and model sets.

A refusal carries the Gateway's present limit of requests. HAProxy then refuses further requests
itself, and counts them (app/launch/haproxy_cfg). The next request that it passes on carries that
count.

HAProxy copies a client's time limit to a header that Serve does not know. Otherwise Serve would
answer a late request in plain text, before the Gateway does.
"""

from models.errors import ConfigError as ConfigError
from models.errors import TandemError

# What to do next; errors end with one of them.
MORE_TIME = (
    "try again, or allow more time (request_timeout_s, answer_timeout_s, x-request-timeout-seconds)"
)
IN_A_SECOND = "try again in a second"
UPDATING = f"a rolling update is under way; {IN_A_SECOND}"
MAX_SHOWN = 40  # characters of a client's value that an error repeats


class ServiceEndedError(TandemError):
    """``tandem serve`` cannot go on: a process has ended, or the service stays unready."""

    code = "service_ended"


class UnverifiedError(TandemError):
    """INT8 lost more accuracy than the set allows; ``allow_unverified`` serves it all the same."""

    code = "unverified"


class ClientGoneError(TandemError):
    """The caller hung up before its answer was there; nobody will see the status."""

    status, code = 499, "client_gone"


class UnauthorizedError(TandemError):
    """The service asks for an API key, and the request has no valid one."""

    status, code = 401, "unauthorized"
    is_given = False  # whether the caller sent something, be it not a key of this service


class ForbiddenError(TandemError):
    """The key does not allow the request: it changes the service, or asks another model set."""

    status, code = 403, "forbidden"


class RateLimitedError(TandemError):
    """The key has sent more requests a second than it may (the answer carries Retry-After).

    The second argument is when it may send again, in seconds; the third the headers that say so.
    """

    status, code = 429, "rate_limited"

    @property
    def retry_after_s(self) -> float:
        """In how many seconds the key may send a request."""
        return float(self.args[1])

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer, besides Retry-After."""
        return dict(self.args[2])


class SlowBodyError(TandemError):
    """The body did not arrive within the request's time; the connection is closed."""

    status, code = 408, "slow_body"


class RouteError(TandemError):
    """The service does not have the path; with status 405, the path does not accept the method."""

    status, code = 404, "http"


class OriginError(TandemError):
    """A preflight request has an origin or a method that ``allowed_origins`` does not admit."""

    status, code = 400, "origin"


class BadParameterError(TandemError):
    """A query parameter, header or form field has an invalid value."""

    status, code = 422, "bad_parameter"


class NotOfferedError(TandemError):
    """The request asks for a plan or an answer set that the set does not have, or may not use."""

    status, code = 400, "not_offered"


class BadTensorError(TandemError):
    """Parts of a request of the Open Inference Protocol disagree with each other or the model."""

    status, code = 400, "bad_tensor"


class UnknownModelError(TandemError):
    """The model, or this version of it, is not served."""

    status, code = 404, "unknown_model"


class UnknownRequestError(TandemError):
    """Feedback for a request that is not remembered, or the service accepts no feedback."""

    status, code = 404, "unknown_request"


class FeedbackExistsError(TandemError):
    """The image has another label already, or several requests have this id."""

    status, code = 409, "feedback_exists"


class TaughtFullError(TandemError):
    """The folder of photographs that are taught has as many, or as many bytes, as it may."""

    status, code = 409, "taught_full"


class SetStateError(TandemError):
    """The set cannot be loaded or unloaded in this service: the default set, for example."""

    status, code = 422, "set_state"


class BadRegionError(TandemError):
    """Shared memory is off, gone, too small, or was replaced after it was registered."""

    status, code = 400, "bad_region"


class NotLocalError(TandemError):
    """Only programs on this machine may ask for this, and a header or the address is another's."""

    status, code = 403, "not_local"


class UnknownRegionError(TandemError):
    """No region of shared memory is registered by this name."""

    status, code = 404, "unknown_region"


class RegionExistsError(TandemError):
    """A region of shared memory was registered twice."""

    status, code = 409, "region_exists"


class PlanChangedError(TandemError):
    """A change of the traffic was made from a plan that is no longer the newest."""

    status, code = 409, "plan_changed"


class NoTrafficError(TandemError):
    """A service without ``traffic`` and ``shadow`` was asked about its traffic."""

    status, code = 404, "no_traffic"


class TrafficLockedError(TandemError):
    """A service without keys was asked to change its traffic, and its settings do not allow it."""

    status, code = 403, "traffic_locked"


class UnsupportedCodingError(TandemError):
    """The Content-Encoding is not supported."""

    status, code = 415, "unsupported_coding"


class BadCodingError(TandemError):
    """The body does not have the Content-Encoding that its header names."""

    status, code = 400, "bad_coding"


class BodyTooLargeError(TandemError):
    """The body has more bytes than the limit; those beyond it were dropped."""

    status, code = 413, "too_many_bytes"


class TooManyFilesError(TandemError):
    """A request has more files than the limit."""

    status, code = 413, "too_many_files"


class OverloadedError(TandemError):
    """Every queue place is taken: come back later (the answer carries Retry-After).

    The further arguments are for HAProxy, which refuses requests beyond them: how many requests may
    be under way in the Gateway at present, how many of this caller, and how many of a new one.
    """

    status, code = 429, "overloaded"

    @property
    def limits(self) -> tuple[int, ...]:
        """The present limits: of all requests, this caller's, a new caller's; () if unknown."""
        return tuple(map(int, self.args[1:]))


class NotReadyError(TandemError):
    """A member has not answered yet, or does not answer any more."""

    status, code = 503, "not_ready"


class NoMemoryError(NotReadyError):
    """A set or a version cannot be loaded: its networks need more memory than is free."""

    code = "no_memory"


class OtherSetError(NotReadyError):
    """A replica serves another model set, during a rolling update."""

    code = "other_set"


class HeavyFileError(NotReadyError):
    """Large images cannot share a batched call; send this one alone."""


class FunctionError(TandemError):
    """The operator's function (``preprocess``, ``combine``) raised, or its result does not fit."""

    code = "function"


class UnhealthyError(TandemError):
    """A replica does not work any more; Serve replaces it."""

    status, code = 503, "unhealthy"


class DeadlineError(TandemError):
    """The request's time is over; work that was still queued for it is dropped."""

    status, code = 504, "deadline"


LIMIT_HEADER = "x-tandem-limit"  # in an answer; HAProxy removes it
CLOSE_HEADER = "x-tandem-close"  # in an answer sent before the body's end; HAProxy removes it
REFUSED_HEADER = "x-tandem-refused"  # in a request, as the headers below
ADDRESS_HEADER = "x-tandem-address"  # of the client, as HAProxy sees it
GATEWAYS_HEADER = "x-tandem-gateways"  # how many answer HAProxy, where there are several
TIMEOUT_COPY = "x-tandem-timeout-seconds"
DEADLINE_METADATA = "x-grpc-timeout"  # grpcio does not pass on gRPC's own header
# The prefix of a gRPC message on the wire, in hexadecimal: whether it is compressed (1 byte), and
# its length (4 bytes). grpcio does not show it before the whole message has arrived.
PREFIX_METADATA = "x-grpc-message-prefix"
SECRET_HEADER = "x-tandem-secret"  # in a request: the run's, by which HAProxy is known
# HAProxy removes these headers from a client's request, over HTTP and gRPC, and so does the Gateway
# where no HAProxy sent them (app/graph/request.py).
INTERNAL_HEADERS = (
    *(LIMIT_HEADER, CLOSE_HEADER, REFUSED_HEADER, GATEWAYS_HEADER),
    *(TIMEOUT_COPY, DEADLINE_METADATA, PREFIX_METADATA, ADDRESS_HEADER, SECRET_HEADER),
)
# The largest count that is accepted. Without HAProxy a client could send any, which the autoscaling
# policy would take for demand.
MAX_REFUSED = 1000


def refused_before(text: str) -> int:
    """Return how many requests HAProxy refused, by its header; 0 if that is not a number."""
    if not (text.isascii() and text.isdigit()):
        return 0
    return int(text) if len(text) < 4 else MAX_REFUSED
