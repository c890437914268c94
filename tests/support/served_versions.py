"""A service of several versions in this process, through HTTP."""

import asyncio
from collections import Counter
from typing import Any, cast

import httpx

from app.http.api import create_api
from app.serve.gateway import Assembly, assemble
from app.serve.replica import Hub
from app.settings import Settings
from app.traffic.control import TrafficControl
from app.traffic.plan import TrafficBook
from tests.support.tiny_networks import expected_label
from tests.support.tiny_versions import LocalHandle, pictures

KEY = "0123456789abcdef0123456789abcdef"
HEADERS = {"authorization": f"Bearer {KEY}"}


class Served:
    """A graph of versions, its HTTP interface, and the deployment Traffic beside it."""

    def __init__(self, settings: Settings) -> None:
        self.graph: Assembly = assemble(settings)
        assert self.graph.versions is not None
        self.handle = LocalHandle(Hub(settings, TrafficBook(self.graph.versions.graph.plan)))
        self.control: TrafficControl = self.graph.versions.control(cast("Any", self.handle))
        api = create_api(self.graph.service, traffic=self.control)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(api), base_url="http://localhost", headers=HEADERS
        )

    async def versions_of(self, number: int) -> Counter[str]:
        """Send pictures; return how many each version answered, by fingerprint."""
        counts: Counter[str] = Counter()
        for color, data in pictures(number):
            answer = (await self.client.post("/v1/classify", content=data)).json()
            counts[answer["model_version"]] += 1
            if answer["model_version"] != self.wrong:
                assert answer["predictions"][0]["label"] == expected_label(color)
        return counts

    async def change(self, shares: Any = None, **more: Any) -> httpx.Response:
        fields = more if shares is None else {"shares": shares, **more}
        return await self.client.put("/v1/traffic", json=fields)

    async def status(self) -> dict[str, Any]:
        """Return what GET says."""
        return (await self.client.get("/v1/traffic")).json()

    async def settle(self) -> None:
        """Wait until no copy is under way."""
        assert self.graph.versions is not None
        while tasks := self.graph.versions.graph._lane._tasks:
            await asyncio.wait(tasks)

    wrong = ""


def settings_of(**more: object) -> Settings:
    return Settings.model_validate({"compile_cache": None, "open_traffic": True} | more)
