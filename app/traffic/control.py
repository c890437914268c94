"""Reads and changes the traffic: the methods behind ``/v1/traffic``."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from app.errors import BadParameterError
from app.traffic.link import TrafficLink
from app.traffic.plan import Plan, Split
from app.traffic.status import TrafficStatus, status_of

EXPECTED = '{"shares": {"NAME@VERSION": 95, ...}, "shadow": null} or {"rollback": true}'


class TrafficControl:
    """The traffic of all Gateways, as one Gateway reads and changes it.

    Args:
        link: the link with the deployment that owns the plan.
        loaded: returns each loaded version with the reason why it must not answer, or None.
        load: loads a version by name. With True, for a version that is to answer clients, it
            first checks the accuracy record and refuses a version that lost too much.

    """

    def __init__(
        self,
        link: TrafficLink,
        loaded: Callable[[], Mapping[str, str | None]],
        load: Callable[[str, bool], Awaitable[None]],
    ) -> None:
        self.link, self._loaded, self._load = link, loaded, load

    async def status(self) -> TrafficStatus:
        """Return the plan and the figures of all Gateways.

        Raises:
            NotReadyError: the deployment Traffic does not answer.

        """
        return status_of(await self.link.status(), self._loaded())

    async def change(self, content: dict[str, Any]) -> TrafficStatus:
        """Make a request's change, wait for all Gateways, and return :meth:`status`.

        Raises:
            BadParameterError: the request is malformed, or a version must not answer clients.
            UnknownModelError: no version has a name that the request gives.
            TandemError: a version cannot be loaded.
            PlanChangedError: the request was made from a plan that is no longer the newest.
            NotReadyError: the deployment Traffic does not answer.

        """
        if content.keys() - {"shares", "shadow", "rollback", "revision"}:
            raise BadParameterError(f"send {EXPECTED}; the revision that you saw is optional")
        revision, is_rollback = content.get("revision"), content.get("rollback", False)
        if revision is not None and (isinstance(revision, bool) or not isinstance(revision, int)):
            raise BadParameterError("revision is not an integer: send that of GET /v1/traffic")
        if is_rollback is True and not content.keys() & {"shares", "shadow"}:
            await self.link.change(None, revision)
        elif is_rollback is False:
            split = Split.of(content)
            if revision is not None:  # checked first: building versions takes seconds
                Plan.of((await self.link.status())["plan"]).check_seen(revision)
            await self._load_all(split)
            await self.link.change(split.as_dict(), revision)
        else:
            raise BadParameterError(f"rollback must be true, without shares: send {EXPECTED}")
        return await self.status()

    async def _load_all(self, split: Split) -> None:
        """Load the split's versions that are not loaded; refuse those that must not answer."""
        self._check(split)
        for name in split.versions:
            await self._load(name, name in split.answering)
        self._check(split)

    def _check(self, split: Split) -> None:
        loaded = self._loaded()
        for name in split.answering:
            if (reason := loaded.get(name)) is not None:
                raise BadParameterError(f"{name} must not answer clients: {reason}")
