"""Translates what a stage's call raises, Ray's errors included, into :class:`TandemError`."""

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException

from app.errors import IN_A_SECOND, MORE_TIME, DeadlineError, NotReadyError, OverloadedError
from models.errors import TandemError

OF_RAY = (RayError, RayServeException)  # what a call through a handle raises


def as_tandem(error: BaseException) -> TandemError:
    """Unwrap a stage's error; what is not ours means that the stage is not there."""
    if isinstance(error, BackPressureError):
        return OverloadedError(f"every queue place is taken; {IN_A_SECOND}")
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TandemError):
        return cause
    if isinstance(cause, TaskCancelledError):
        return DeadlineError(f"the request was cancelled on its way through the graph; {MORE_TIME}")
    return NotReadyError(f"a stage of the graph failed ({type(cause).__name__}); try again")
