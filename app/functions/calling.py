"""Calls an operator's function for requests: on threads, checked, traced and counted."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from opentelemetry.trace import SpanContext

from app.compute.health import Health
from app.errors import FunctionError
from app.functions.answers import WrongAnswerError
from app.functions.loading import OwnFunction
from app.metrics.meter import meter
from app.metrics.table import FAILED_FUNCTIONS
from app.tracing.parents import current_parent
from app.tracing.spans import record

T = TypeVar("T")
logger = logging.getLogger("ray.serve")


class FunctionCalls:
    """The calls of the operator's function in this process, ``num_threads`` at a time."""

    def __init__(self, function: OwnFunction, num_threads: int) -> None:
        self.function = function
        self._threads = ThreadPoolExecutor(num_threads, f"tandem-{function.stage}")
        self._health = Health(f"call of {function.name}", counts_failures=False)

    def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a call hangs."""
        self._health.check()

    async def call(self, check: Callable[[object], T], *arguments: object) -> T:
        """Call the function with ``arguments``; return its result after ``check``.

        Raises:
            FunctionError: the function raised, or ``check`` raised :class:`WrongAnswerError`.

        """
        parent, loop = current_parent(), asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._run, parent, check, arguments)

    def _run(
        self,
        parent: SpanContext | None,
        check: Callable[[object], T],
        arguments: tuple[object, ...],
    ) -> T:
        started, error = time.monotonic(), None
        try:
            with self._health.run():
                return check(self.function.call(*arguments))
        except BaseException as raised:  # SystemExit included, which would end the event loop
            error = f"{type(raised).__name__}: {raised}"
            raise self._failure(raised) from raised
        finally:
            if parent is not None:
                facts = {"tandem.stage": self.function.stage, "tandem.function": self.function.name}
                record("function", parent, started, time.monotonic(), facts, error=error)

    def _failure(self, raised: BaseException) -> FunctionError:
        """Log and count a failure; return the client's error."""
        stage, name = self.function.stage, self.function.name
        logger.error("%s (%s) failed", stage, name, exc_info=raised)
        meter.count(FAILED_FUNCTIONS, stage=stage)
        kind = type(raised).__name__
        what = f"returned {raised}" if isinstance(raised, WrongAnswerError) else f"raised {kind}"
        return FunctionError(
            f"{stage} ({name}), a function of this service's operator, {what}; its log has the "
            "details. Another image may be answered"
        )
