"""The service with a response cache, and its fake stages within reach."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from app.answers import Classified, Timings
from app.graph.request import ClassifyRequest
from app.settings import Settings
from app.stages.combiner import Combiner
from tests.support.fakes import FakeDecoder, FakeMember, arrived, service_of

ONE, TWO = b"good", b"good two"  # by whose lengths the members tell them apart
ROWS = {
    "sure": {4: (0.1, 0.8, 0.1), 8: (0.3, 0.3, 0.4), 5: (0.6, 0.3, 0.1)},
    "unsure": {4: (0.2, 0.5, 0.3), 8: (0.4, 0.3, 0.3), 5: (0.2, 0.3, 0.5)},
}


class Cached:
    def __init__(self, tiny_set, *, as_handles: bool = False, **settings: object) -> None:
        self.settings = Settings(model_set=str(tiny_set), **({"cache": "local"} | settings))
        self.decoder = FakeDecoder()
        self.members = {"sure": FakeMember(), "unsure": FakeMember()}
        for name, member in self.members.items():
            member.rows = {pixel: np.array(row, np.float32) for pixel, row in ROWS[name].items()}
        stages = (self.decoder, self.members, Combiner(self.settings))
        self.service = service_of(self.settings, *stages, as_handles=as_handles)

    async def classify(self, *files: bytes, top_k: int = 2, **options: Any):
        options = {"plan": self.settings.plan} | options
        request = ClassifyRequest(list(files), top_k, 10.0, "id", arrived(), **options)
        return await self.service.classify(request)

    @property
    def num_computed(self) -> int:
        return sum(map(len, self.members["sure"].seen))

    def hold(self) -> asyncio.Event:
        """Let computations wait for what is returned."""
        gate = asyncio.Event()
        for member in self.members.values():
            member.gate = gate
        return gate

    async def until_asked(self, times: int = 1) -> None:
        while len(self.members["unsure"].asked) < times:
            await asyncio.sleep(0)


def without_timings(answer: Classified) -> Classified:
    return replace(answer, timings_ms=Timings(0.0, []), cached=None)
