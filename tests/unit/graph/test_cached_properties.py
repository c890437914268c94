"""Whatever requests come beside each other, fail or go away: right answers, and nothing left."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.deployments.combiner import Combiner
from app.errors import OverloadedError
from app.graph.cached import CachedEnsemble
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.messages import Fault, MemberAnswer
from app.settings import Settings
from tests.support.fakes import FakeDecoder, FakeMember, service_of
from tests.support.tiny_networks import LABELS

BOUNDED = settings(
    max_examples=150,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FILES = {name: b"good" + bytes(name) for name in range(4)} | {9: b"bad"}
ROWS = {4 + name: (0.5 - name / 8, name / 8, 0.5) for name in range(4)}
ASKED = st.fixed_dictionaries(
    {
        "files": st.lists(st.sampled_from(sorted(FILES)), min_size=1, max_size=4),
        "lane": st.sampled_from(["interactive", "bulk"]),
        "cache_use": st.sampled_from(["use", "use", "use", "renew", "off"]),
        "starts_after": st.integers(0, 3),  # turns of the loop
        "leaves_after": st.one_of(st.none(), st.integers(0, 12)),
    }
)


class Unsteady(FakeMember):
    """A member whose calls take some turns of the loop, and of which some fail."""

    def __init__(self, fails: set[int], turns: int) -> None:
        super().__init__()
        self.rows = {pixel: np.array(row, np.float32) for pixel, row in ROWS.items()}
        self._fails, self._turns = fails, turns

    async def classify(self, images, left_s, lane="interactive") -> MemberAnswer:
        number = len(self.asked)
        answer = await super().classify(images, left_s, lane)
        for _ in range(self._turns):
            await asyncio.sleep(0)
        if number in self._fails:
            raise OverloadedError("no place")
        return answer


@BOUNDED
@given(
    asked=st.lists(ASKED, min_size=1, max_size=8),
    fails=st.sets(st.integers(0, 6), max_size=4),
    turns=st.integers(0, 3),
    policy=st.sampled_from(["all", "any"]),
    margin=st.sampled_from([None, 0.2]),  # of which the third file is sure
)
def test_requests_beside_each_other(tiny_set: Path, asked, fails, turns, policy, margin):
    async def play() -> None:
        options = Settings(
            model_set=str(tiny_set),
            cache="local",
            answer_policy=policy,
            member_patience_s=0.0,
            cascade_margin=margin,
        )
        members = {"sure": Unsteady(fails, turns), "unsure": Unsteady(set(), turns)}
        service = service_of(options, FakeDecoder(), members, Combiner(options))

        async def one(of: dict) -> None:
            for _ in range(of["starts_after"]):
                await asyncio.sleep(0)
            files = [FILES[name] for name in of["files"]]
            request = ClassifyRequest(
                files, 3, 60.0, "id", RequestObserver(), of["lane"], cache_use=of["cache_use"]
            )
            answers = await service.classify(request)
            for name, answer in zip(of["files"], answers, strict=True):
                check(answer, name)
                assert of["cache_use"] == "use" or isinstance(answer, Fault) or not answer.cached

        async def perhaps_leaving(of: dict) -> None:
            task = asyncio.ensure_future(one(of))
            if of["leaves_after"] is not None:
                for _ in range(of["leaves_after"]):
                    await asyncio.sleep(0)
                task.cancel()
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            if ended is not None:
                assert isinstance(ended, OverloadedError | asyncio.CancelledError), repr(ended)
                assert of["leaves_after"] is not None or isinstance(ended, OverloadedError)

        async with asyncio.timeout(30):
            await asyncio.gather(*map(perhaps_leaving, asked))
        graph = service._graph
        assert isinstance(graph, CachedEnsemble)
        assert len(graph.cache._flights) == 0
        kept = {name: graph.cache.read(graph.keys.key(data)) for name, data in FILES.items()}
        num_rows = {name: len(rows) for name, rows in kept.items() if rows is not None}
        assert num_rows == {name: 1 if margin and name == 2 else 2 for name in num_rows}

    asyncio.run(play())


def check(answer: Any, name: int) -> None:
    if name == 9:
        assert isinstance(answer, Fault)
        return
    assert not isinstance(answer, Fault)
    found = {p.label: p.probability for p in answer.predictions}
    assert found == dict(zip(LABELS, np.array(ROWS[4 + name], np.float32).tolist(), strict=True))
    absent = {*(answer.skipped_members or ()), *(answer.missing_members or ())}
    assert {*answer.members} == {"sure", "unsure"} - absent
    assert answer.degraded == bool(answer.missing_members)
