"""Good requests beside those that want everything: ``python tests/load/crowding.py --json FILE``.

Good single photos at a steady rate, alone; then beside clients who send forms of large pictures (8
megapixels with 16 bits and alpha: 70 KB of PNG that take over half a second to decode) as fast as
they are answered; then beside forms of 64 photos, which fill the members' queues. Prints JSON: what
became of the good requests and their latency, and of the others.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import cv2
import numpy as np
import typer
from good_load import GoodLoad
from machine import describe
from result_file import write_result
from running import running_service

from app.bench.load import drawn_photos

SIDE = 2896  # px: the largest square of 16-bit samples that the default max_full_pixels lets in
LARGE_FILES, FORM_FILES = 16, 64
AFTER_REFUSAL_S = 0.2  # an attacker that is refused comes back sooner than it is told to


def main(
    seconds: Annotated[float, typer.Option(help="of each attack", min=5)] = 60.0,
    good_rate: Annotated[float, typer.Option(help="good requests/s, Poisson", min=0.1)] = 5.0,
    clients: Annotated[int, typer.Option(help="attackers at a time", min=1)] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Run good load alone, then beside each attack, against one service."""
    photos = drawn_photos()
    large = cv2.imencode(".png", np.zeros((SIDE, SIDE, 4), np.uint16))[1].tobytes()
    attacks = {
        "large_pictures": [large] * LARGE_FILES,
        "forms": [photos[i % len(photos)] for i in range(FORM_FILES)],
    }
    rows: dict[str, Any] = {}
    with running_service() as service:
        good = asyncio.run(GoodLoad.learn(service.url, photos))
        asyncio.run(good.run(good_rate, 10.0))
        rows["alone"] = {"good": asyncio.run(good.run(good_rate, seconds))}
        for name, files in attacks.items():
            attack = Attack(service.url, files)
            rows[f"beside_{name}"] = asyncio.run(_beside(attack, good, good_rate, seconds, clients))
    result = {
        **describe(),
        "good_rate": good_rate,
        "clients": clients,
        "large_picture": {"side": SIDE, "bits": 16, "channels": 4, "bytes": len(large)},
        **rows,
    }
    write_result(result, json_file)


class Attack:
    """Clients that send one and the same form again and again."""

    def __init__(self, url: str, files: list[bytes]) -> None:
        self._url, self._files = url, files
        self.fates: Counter[str] = Counter()

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Send the form until cancelled."""
        while True:
            form = aiohttp.FormData()
            for data in self._files:
                form.add_field("files", data, filename="a", content_type="image/png")
            try:
                async with session.post(f"{self._url}/v1/classify", data=form) as answer:
                    await answer.read()
                    self.fates[str(answer.status)] += 1
                    if answer.status == 429:
                        await asyncio.sleep(AFTER_REFUSAL_S)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.fates[type(error).__name__] += 1
                await asyncio.sleep(AFTER_REFUSAL_S)


async def _beside(
    attack: Attack, good: GoodLoad, rate: float, seconds: float, clients: int
) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=30.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        with _tasks([attack.run(session) for _ in range(clients)]):
            figures = await good.run(rate, seconds)
    return {"good": figures, "attack_by_status": dict(attack.fates.most_common())}


@contextlib.contextmanager
def _tasks(coroutines: list[Any]) -> Iterator[None]:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    typer.run(main)
