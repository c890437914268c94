"""The errors of serving, each with its HTTP status and code, and the headers shared with HAProxy.

:mod:`models.errors` has the base class, and the errors of images and model sets.

A refusal carries the Gateway's present limit of requests. HAProxy then refuses further requests
itself, and counts them (app/launch/haproxy_cfg). The next request that it passes on carries that
count.

HAProxy copies a client's time limit to a header that Serve does not know. Otherwise Serve would
answer a late request in plain text, before the Gateway does.
"""

from models.errors import TandemError

# What to do next; errors end with one of them.
MORE_TIME = (
    "try again, or allow more time (request_timeout_s, answer_timeout_s, x-request-timeout-seconds)"
)
IN_A_SECOND = "try again in a second"
UPDATING = f"a rolling update is under way; {IN_A_SECOND}"
MAX_SHOWN = 40  # characters of a client's value that an error repeats


class ConfigError(TandemError):
    """A configuration that cannot be used, or that this machine cannot serve."""

    code = "config"


class UnverifiedError(TandemError):
    """INT8 lost more accuracy than the set allows; ``allow_unverified`` serves it all the same."""

    code = "unverified"


class ClientGoneError(TandemError):
    """The caller hung up before its answer was there; nobody will see the status."""

    status = 499
    code = "client_gone"


class UnauthorizedError(TandemError):
    """A service with keys was called without one of them."""

    status = 401
    code = "unauthorized"
    is_given = False  # whether the caller sent something, be it not a key of this service


class SlowBodyError(TandemError):
    """The body did not arrive within the request's time; the connection is closed."""

    status = 408
    code = "slow_body"


class RouteError(TandemError):
    """A path that the service does not have; with status 405, a method that the path refuses."""

    status = 404
    code = "http"


class OriginError(TandemError):
    """A preflight request of a page, or for a method, that ``allowed_origins`` does not admit."""

    status = 400
    code = "origin"


class BadParameterError(TandemError):
    """A query parameter, header or form that does not make sense."""

    status = 422
    code = "bad_parameter"


class BadTensorError(TandemError):
    """Parts of a request of the Open Inference Protocol disagree with each other or the model."""

    status = 400
    code = "bad_tensor"


class UnknownModelError(TandemError):
    """A model, or a version of one, that is not served."""

    status = 404
    code = "unknown_model"


class UnknownRequestError(TandemError):
    """Feedback for a request that is not remembered, or to a service that takes none."""

    status = 404
    code = "unknown_request"


class FeedbackExistsError(TandemError):
    """Feedback for an image that has another label already, or for an id of several requests."""

    status = 409
    code = "feedback_exists"


class SetStateError(TandemError):
    """A set that cannot be loaded or unloaded in this service, such as the default."""

    status = 422
    code = "set_state"


class BadRegionError(TandemError):
    """Shared memory that is off, gone, too small, or not what was registered."""

    status = 400
    code = "bad_region"


class NotLocalError(TandemError):
    """A caller that is not known to be on this machine asked for shared memory."""

    status = 403
    code = "not_local"


class UnknownRegionError(TandemError):
    """A region of shared memory that is not registered."""

    status = 404
    code = "unknown_region"


class RegionExistsError(TandemError):
    """A region of shared memory was registered twice."""

    status = 409
    code = "region_exists"


class PlanChangedError(TandemError):
    """A change of the traffic was made from a plan that is no longer the newest."""

    status = 409
    code = "plan_changed"


class NoTrafficError(TandemError):
    """A service without ``traffic`` and ``shadow`` was asked about its traffic."""

    status = 404
    code = "no_traffic"


class TrafficLockedError(TandemError):
    """A service without keys was asked to change its traffic, and its settings do not allow it."""

    status = 403
    code = "traffic_locked"


class UnsupportedCodingError(TandemError):
    """A Content-Encoding that is not read."""

    status = 415
    code = "unsupported_coding"


class BadCodingError(TandemError):
    """A body that is not in the Content-Encoding that its header names."""

    status = 400
    code = "bad_coding"


class BodyTooLargeError(TandemError):
    """More bytes than the limit; what came over it was dropped as it arrived."""

    status = 413
    code = "too_many_bytes"


class TooManyFilesError(TandemError):
    """More files in one request than the limit."""

    status = 413
    code = "too_many_files"


class OverloadedError(TandemError):
    """Every queue place is taken: come back later (the answer carries Retry-After).

    A second argument is how many requests the Gateway lets be under way at present, for HAProxy to
    refuse what comes beyond.
    """

    status = 429
    code = "overloaded"

    @property
    def limit(self) -> int | None:
        """How many requests may be under way at present; None where that has not changed."""
        return int(self.args[1]) if len(self.args) > 1 else None


class NotReadyError(TandemError):
    """A member has not answered yet, or no longer does."""

    status = 503
    code = "not_ready"


class OtherSetError(NotReadyError):
    """A replica of another model set was met, in the middle of a rolling update."""

    code = "other_set"


class HeavyFileError(NotReadyError):
    """A large picture came in a call with files of others: it is to come in one of its own."""


class FunctionError(TandemError):
    """A function of the operator's (``preprocess``, ``combine``) raised, or returned nonsense."""

    code = "function"


class UnhealthyError(TandemError):
    """A replica that no longer works; Serve hears of it and replaces the replica."""

    status = 503
    code = "unhealthy"


class DeadlineError(TandemError):
    """The request's time is over; work that was still queued for it is dropped."""

    status = 504
    code = "deadline"


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
