"""The errors of the client, each with the service's message, code and request id.

Every constructor hands its arguments to ``Exception``, so that errors can be pickled.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tandem_client.answers import Classification

Reason = Literal["overloaded", "not_ready", "refused", "reset"]


class TandemError(Exception):
    """Root of the tree.

    Attributes:
        code: stable: the service's, or the client's own (``unreachable``, ``bad_answer``,
            ``deadline``, ``unreadable``, ``bad_array``, ``degraded``).
        request_id: None without an answer, or for the error of a file among several.
        status: the HTTP status; None in the same cases. Over gRPC it is that of the gRPC status:
            400 also for 413, 415 and 422, which gRPC does not tell apart.
        retry_after_s: when the service suggests to try again, in s.

    """

    reason: Reason | None = None  # why it may be retried; None: never

    def __init__(
        self,
        message: str,
        code: str = "internal",
        request_id: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code, request_id, status, retry_after_s)
        self.message, self.code = message, code
        self.request_id, self.status = request_id, status
        self.retry_after_s = retry_after_s  # the service's advice

    def __str__(self) -> str:
        asked = f", request {self.request_id}" if self.request_id else ""
        return f"{self.message} ({self.code}{asked})"


class BadImage(TandemError):
    """The image cannot be used: not an image, damaged, unsupported, too large, or unreadable."""


class BadRequest(TandemError):
    """A parameter or the whole request is invalid: ``bad_parameter``, ``too_many_files``."""


class Unauthorized(TandemError):
    """The service requires a key, and the request had none or a wrong one."""


class Overloaded(TandemError):
    """All places are taken (429), even after the retries that the time allowed."""

    reason = "overloaded"


class NotReady(TandemError):
    """A member of the ensemble does not answer yet, or no longer (503)."""

    reason = "not_ready"


class DeadlineExceeded(TandemError):
    """There was no answer in time, by the service (504) or the client."""


class ServiceError(TandemError):
    """The service failed (500); its log has the request id."""


class BrokenOff(ServiceError):
    """The part of the service that had the request ended before it answered (502)."""

    reason = "reset"


class BadAnswer(TandemError):
    """The answer is not Tandem's: perhaps another service has this address."""


class Unreachable(TandemError):
    """No answer: refused, broken off, an unknown address, or an untrusted certificate."""

    def __init__(self, message: str, reason: Reason | None = None) -> None:
        super().__init__(message, "unreachable")
        self.args = (message, reason)
        self.reason = reason


class Degraded(TandemError):
    """Fewer members answered than were asked, and the client does not accept their answer.

    ``answer`` is the answer of the others.
    """

    def __init__(self, message: str, answer: "Classification") -> None:
        super().__init__(message, "degraded", answer.request_id, 200)
        self.args = (message, answer)
        self.answer = answer


_BY_CODE: Mapping[str, type[TandemError]] = {
    "not_an_image": BadImage,
    "corrupt_image": BadImage,
    "unsupported_format": BadImage,
    "too_many_pixels": BadImage,
    "too_many_bytes": BadImage,
    "bad_parameter": BadRequest,
    "too_many_files": BadRequest,
    "unauthorized": Unauthorized,
    "overloaded": Overloaded,
    "not_ready": NotReady,
    "other_set": NotReady,
    "unhealthy": NotReady,
    "broken_off": BrokenOff,
    "slow_body": DeadlineExceeded,
    "deadline": DeadlineExceeded,
}
_BY_STATUS: Mapping[int, type[TandemError]] = {
    401: Unauthorized,
    403: Unauthorized,
    408: DeadlineExceeded,
    429: Overloaded,
    503: NotReady,
    504: DeadlineExceeded,
}


def has_error_of(status: int) -> bool:
    """Whether an HTTP status alone determines the error, whichever server sent it."""
    return status in _BY_STATUS


def error_of(
    fields: Mapping[str, Any],
    status: int | None = None,
    retry_after_s: float | None = None,
) -> TandemError:
    """Return the error for the service's ``{"code", "message", "request_id"}``.

    A code that this client does not know is mapped by the HTTP status, if there is one.
    """
    code, message, request_id = (fields.get(name) for name in ("code", "message", "request_id"))
    kind = _BY_CODE.get(str(code)) or _of_status(status)
    return kind(str(message), str(code), request_id and str(request_id), status, retry_after_s)


def _of_status(status: int | None) -> type[TandemError]:
    if status is None:
        return ServiceError
    default = BadRequest if 400 <= status < 500 else ServiceError
    return _BY_STATUS.get(status, default)
