"""A steady load whose every answer is checked: bursts, so that a fault finds requests under way."""

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
from drawn_classes import Picture

TOLERANCE = 1e-3  # of a probability: batches of other sizes round otherwise
TIMEOUT_S = 30.0
RETRY = "Retry-After"
# Never accepted: HAProxy is not there, or says itself, without a request id, that it is not ready.
REFUSED = ("http_429", "not_connected", "not_ready")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request; times by ``time.monotonic``."""

    sent: float
    ended: float
    kind: str  # right, wrong, http_STATUS, broken (after it was sent), timeout, ...

    @property
    def is_lost(self) -> bool:
        return self.kind not in ("right", "wrong", *REFUSED)


class CheckedLoad:
    """``burst`` requests at once every ``every_s``, from a thread of its own, until it is left."""

    def __init__(
        self,
        url: str,
        pictures: Sequence[Picture],
        burst: int,
        every_s: float,
        *,
        is_kept: bool = False,
    ) -> None:
        """``is_kept``: connections are used again, in place of one for each request."""
        self.url, self.burst, self.every_s, self.is_kept = url, burst, every_s, is_kept
        self.outcomes: list[Outcome] = []
        self.num_under_way = 0
        self._is_over = threading.Event()
        self._pictures = itertools.cycle(pictures)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "CheckedLoad":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(TIMEOUT_S + 10)

    @property
    def rate(self) -> float:
        return self.burst / self.every_s

    def wait_under_way(self, number: int, within_s: float = 10) -> None:
        """Return as soon as so many requests wait for their answers."""
        deadline = time.monotonic() + within_s
        while self.num_under_way < number:
            if time.monotonic() > deadline:
                raise SystemExit(f"never {number} requests under way within {within_s:g} s")
            time.sleep(0.001)

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=not self.is_kept)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            tasks: set[asyncio.Task[None]] = set()
            due = time.monotonic()
            while not self._is_over.is_set():
                for _ in range(self.burst):
                    task = asyncio.create_task(self._one(session, next(self._pictures)))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                due += self.every_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            await asyncio.gather(*tasks)

    async def _one(self, session: aiohttp.ClientSession, picture: Picture) -> None:
        sent = time.monotonic()
        self.num_under_way += 1
        try:
            kind = await self._send(session, picture)
        finally:
            self.num_under_way -= 1
        self.outcomes.append(Outcome(sent, time.monotonic(), kind))

    async def _send(self, session: aiohttp.ClientSession, picture: Picture) -> str:
        try:
            url = f"{self.url}/v1/classify?top_k={len(picture.probabilities)}"
            async with session.post(url, data=picture.data) as answer:
                if answer.content_type != "application/json":
                    return f"text_{answer.status}"  # none of our own answers
                if answer.status == 503 and not (await answer.json())["error"]["request_id"]:
                    return "not_ready"
                if answer.status != 200:
                    later = "_later" if answer.status > 500 and RETRY in answer.headers else ""
                    return f"http_{answer.status}{later}"
                return "right" if is_right(await answer.json(), picture) else "wrong"
        except TimeoutError:
            return "timeout"
        except aiohttp.ClientConnectorError:
            return "not_connected"
        except aiohttp.ClientError:
            return "broken"


def is_right(answer: dict[str, object], picture: Picture) -> bool:
    """Compare every class and every member with what the networks say in process."""
    told = {one["label"]: one["probability"] for one in answer["predictions"]}  # type: ignore[attr-defined]
    return (
        set(answer["members"]) == set(picture.members)  # type: ignore[call-overload]
        and set(told) == set(picture.probabilities)
        and all(np.isclose(told[n], p, atol=TOLERANCE) for n, p in picture.probabilities.items())
    )


def summary(load: CheckedLoad, at: float, recovered: float) -> dict[str, object]:
    """Return the figures of a load during which something broke ``at`` a time."""
    kinds = Counter(outcome.kind for outcome in load.outcomes)
    bad = [o for o in load.outcomes if o.is_lost or o.kind in REFUSED]
    after = [o for o in load.outcomes if o.ended >= at and o.kind == "right"]
    num_refused = sum(kinds[kind] for kind in REFUSED)
    return {
        "offered_per_s": load.rate,
        "requests": len(load.outcomes),
        "accepted": len(load.outcomes) - num_refused,
        "right": kinds["right"],
        "wrong": kinds["wrong"],
        "lost": sum(outcome.is_lost for outcome in load.outcomes),
        "refused": num_refused,
        "kinds": dict(kinds),
        "failing_for_s": round(max(o.ended for o in bad) - at, 2) if bad else 0.0,
        "slowest_right_ms": round(max(((o.ended - o.sent) * 1e3 for o in after), default=0.0), 1),
        "recovered_after_s": round(recovered - at, 2),
    }
