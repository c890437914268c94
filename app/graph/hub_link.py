"""Facts that all Gateways share: the book of a hub, and the way to it.

Every second each Gateway reports what it knows, and gets the newest state. A book that was started
again learns the state from these reports. :mod:`app.serve.replica` runs the books as deployments.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, Protocol, Self, TypeVar

from app.errors import NotReadyError
from app.telemetry.spans import untraced_task
from models.errors import TandemError

logger = logging.getLogger("ray.serve")
EXCHANGE_EVERY_S = 1.0
CALL_S = 5.0  # time limit of a call of the hub
FIRST_S = 20.0  # a starting Gateway waits this long; Serve's health check takes 30 s
IS_THERE_S = 5.0  # A Gateway serves if it reported within this time; it reports every second.
MAX_REPORTS = 1000  # Gateways whose reports are kept apart


class Facts(Protocol):
    """The shared state, an immutable value; ``origin`` differs between services' settings."""

    @property
    def origin(self) -> str: ...

    @property
    def revision(self) -> int:
        """Grows by one with each change."""

    def merged(self, other: Self) -> Self:
        """Return the newer of both; every process must choose the same."""


F = TypeVar("F", bound=Facts)
R = TypeVar("R")  # what a Gateway reports besides


class Book(Generic[F, R]):
    """Keeps the newest facts, and each Gateway's last report; ``clock`` returns seconds."""

    def __init__(self, facts: F, clock: Callable[[], float] = time.monotonic) -> None:
        self.facts, self._clock = facts, clock
        # By Gateway: what it serves, when it said so, and more; the newest report is the last.
        self._reports: dict[str, tuple[int, float, R]] = {}

    def report(self, gateway: str, facts: F, more: R, revision: int | None = None) -> F | None:
        """Record a Gateway's facts, and return the newest; None if its settings differ.

        If the Gateway's facts are newer, the book adopts them. ``revision`` is the one that the
        Gateway serves, by default that of its facts.
        """
        if facts.origin != self.facts.origin:
            return None
        self.facts = self.facts.merged(facts)
        self._reports.pop(gateway, None)
        serves = facts.revision if revision is None else revision
        self._reports[gateway] = serves, self._clock(), more
        if len(self._reports) > MAX_REPORTS:
            self._forget(self._reports.pop(next(iter(self._reports)))[-1])
        return self.facts

    def revisions(self) -> list[int]:
        """Return the revision that each live Gateway serves."""
        now = self._clock()
        return [serves for serves, at, _ in self._reports.values() if now - at < IS_THERE_S]

    def _forget(self, more: R) -> None:
        """React to the loss of a Gateway's report, dropped as the oldest of too many."""


class HubHandle:
    """Asks the book of the deployment ``name`` behind ``handle``."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name = handle, name

    async def call(self, method: str, *args: Any) -> Any:
        """Return the answer of a method of the book, or raise the :class:`TandemError` it raised.

        Raises:
            NotReadyError: the deployment does not answer.
        """
        # Late: tandem serve and tandem traffic import this module, and Ray must not come with it.
        from app.graph.availability import CALL_ERRORS, as_tandem

        async with self.in_time(CALL_S):
            try:
                return await self._handle.ask.remote(method, *args)
            except (TandemError, *CALL_ERRORS) as error:
                raise as_tandem(error) from error

    @contextlib.asynccontextmanager
    async def in_time(self, limit_s: float) -> AsyncIterator[None]:
        """Turn a block that takes too long into a :class:`NotReadyError`."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            raise NotReadyError(
                f"the deployment {self._name} did not answer within {limit_s:g} s; requests are "
                "served as before: try again"
            ) from error


class HubLink(HubHandle, ABC):
    """Exchanges facts every second with a deployment."""

    def __init__(self, handle: Any, name: str) -> None:
        super().__init__(handle, name)
        self._loading: asyncio.Task[None] | None = None  # loads what this Gateway lacks
        self._is_away = False  # whether the deployment failed to answer, which is logged once
        self._gateway = uuid.uuid4().hex
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Exchange facts once, then every second in the background.

        Only the first call has an effect. It waits at most ``FIRST_S`` seconds.
        """
        if self._task is not None:
            return
        self._task = untraced_task(self._go_on())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                while not await untraced_task(self._exchanged()):
                    await asyncio.sleep(EXCHANGE_EVERY_S)
                if self._loading is not None:
                    await asyncio.shield(self._loading)
                    await untraced_task(self._exchanged())

    @abstractmethod
    async def _exchange(self) -> None:
        """Report this Gateway's facts, take changed ones, and start loading missing parts."""

    def _load_soon(self, load: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin to load what this Gateway lacks, unless it already does."""
        if self._loading is None or self._loading.done():
            self._loading = untraced_task(load())

    async def _everywhere(self, revision: int, within_s: float) -> list[int]:
        """Wait until all Gateways serve a revision, and return the revisions that they serve."""
        revisions = [0]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._exchange()
                while min(revisions := await self.call("revisions"), default=revision) < revision:
                    await asyncio.sleep(EXCHANGE_EVERY_S / 4)
                    await self._exchange()
        return revisions

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(EXCHANGE_EVERY_S)
            await self._exchanged()

    async def _exchanged(self) -> bool:
        """Exchange, and return whether that succeeded; if not, requests are served as before."""
        try:
            await self._exchange()
        except Exception as error:
            if not self._is_away:
                text = error.message if isinstance(error, TandemError) else repr(error)
                logger.warning("no exchange with the deployment %s: %s", self._name, text)
            self._is_away = True
            return False
        self._is_away = False
        return True
