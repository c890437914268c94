"""A Gateway's connection to a deployment of one replica that holds facts for all Gateways."""

import asyncio
import contextlib
import logging
import uuid
from abc import ABC, abstractmethod
from typing import Any

from app.calls.attempts import CALL_ERRORS, as_tandem
from app.errors import NotReadyError
from app.tracing.parents import untraced_task
from models.errors import TandemError

logger = logging.getLogger("ray.serve")
EXCHANGE_EVERY_S = 1.0
CALL_S = 5.0  # time limit of a call of the deployment
FIRST_S = 20.0  # a starting Gateway waits this long; Serve's health check takes 30 s


class HubLink(ABC):
    """Exchanges facts every second with the deployment ``name`` behind ``handle``."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name = handle, name
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

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(CALL_S):
                return await getattr(self._handle, method).remote(*args)
        except TimeoutError as error:
            raise NotReadyError(
                f"the deployment {self._name} did not answer within {CALL_S:g} s; requests are "
                "served as before: try again"
            ) from error
        except (TandemError, *CALL_ERRORS) as error:
            raise as_tandem(error) from error
