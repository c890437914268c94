"""What the response cache saves, and costs: ``python tests/load/cache.py PHOTOS``.

Services without a cache and with ``cache: local`` run side by side and are loaded in turns. Of the
requests a given share are for images that were seen before, drawn by Zipf's law from a few hundred;
the others are for images that never came before (a photo with a few bytes of its own behind its
end, which change its hash and none of its pixels). At 0 the difference is what the cache costs.
What a hit alone costs, without HTTP, is measured in this process. Prints JSON.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, overload

import httpx
import psutil
import typer
import yaml
from machine import ROOT, describe, write_result
from running import Running, running_service

from app.answers import Fault
from app.bench.load import Load, Target, photos_in, run_load
from app.bench.measurement import summarise
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.serve.gateway import assemble
from app.settings import Settings

HIT_RATES = (0.0, 0.5, 0.9, 0.99)
CACHES = ("none", "local")
NUM_HOT = 300  # images that are asked for again and again
ZIPF_EXPONENT = 1.0  # the n-th is asked for 1/n as often as the first
NUM_HITS = 2000  # whose cost is measured by itself
NUM_DRAWN = 2**20  # requests, before the draw begins anew
NEVER = 2**32  # numbers of images that are asked for once begin here


class ZipfPhotos(Sequence[bytes]):
    """A request's photo by its number; ``turn`` keeps the new ones of each turn apart."""

    def __init__(self, photos: Sequence[bytes], hit_rate: float, turn: int) -> None:
        self._photos, self._hit_rate, self._turn = photos, hit_rate, turn
        weights = (1 / rank**ZIPF_EXPONENT for rank in range(1, NUM_HOT + 1))
        self._weights = list(accumulate(weights))

    def __len__(self) -> int:
        return NUM_DRAWN

    @overload
    def __getitem__(self, number: int) -> bytes: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[bytes]: ...
    def __getitem__(self, number: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        draw = random.Random(self._turn * NUM_DRAWN + number)
        if draw.random() < self._hit_rate:
            (image,) = draw.choices(range(NUM_HOT), cum_weights=self._weights)
        else:
            image = NEVER + self._turn * NUM_DRAWN + number
        return image_of(self._photos, image)


def image_of(photos: Sequence[bytes], image: int) -> bytes:
    """Return an image of its own bytes and a photo's pixels."""
    return photos[image % len(photos)] + image.to_bytes(8, "big")


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="of each turn", min=0.1)] = 5.0,
    clients: Annotated[int, typer.Option(min=1)] = 16,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure all in turns."""
    bodies = photos_in(photos)
    rows: dict[str, list[dict[str, float | None]]] = {}
    hit = asyncio.run(cost_of_a_hit(bodies))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        services = {
            cache: stack.enter_context(running_service("--config", str(config_of(folder, cache))))
            for cache in CACHES
        }
        for service in services.values():
            ask_for_the_hot_ones(service, bodies)
        turns = [(cache, rate) for cache in CACHES for rate in HIT_RATES]
        for number in range(rounds):
            for place, (cache, rate) in enumerate(random.Random(number).sample(turns, len(turns))):
                target_photos = ZipfPhotos(bodies, rate, number * len(turns) + place)
                row = load(services[cache], target_photos, seconds, clients)
                rows.setdefault(f"{cache} {rate:g}", []).append(row)
                typer.echo(f"round {number + 1} of {rounds}: {cache} {rate:g} {row}", err=True)
        check_it_was_cached(services, bodies)
    write_result(
        {
            "machine": describe(),
            "clients": clients,
            "hot_images": NUM_HOT,
            "zipf_exponent": ZIPF_EXPONENT,
            "hit": hit,
            "median": {name: medians(found) for name, found in sorted(rows.items())},
            "rounds": rows,
        },
        out,
    )


async def cost_of_a_hit(photos: Sequence[bytes]) -> dict[str, float]:
    """Return the CPU-ms of a hit in a graph in this process: hash, look, order, answer."""
    photo = sorted(photos, key=len)[len(photos) // 2]
    service = assemble(Settings(cache="local")).service

    async def ask() -> None:
        (answer,) = await service.classify(
            ClassifyRequest([photo], 5, 60.0, "hit", RequestObserver())
        )
        assert not isinstance(answer, Fault)

    await ask()
    began = time.process_time()
    for _ in range(NUM_HITS):
        await ask()
    cpu_ms = (time.process_time() - began) * 1e3 / NUM_HITS
    return {"photo_bytes": len(photo), "cpu_ms": round(cpu_ms, 4)}


def config_of(folder: Path, cache: str) -> Path:
    """Write serve_config.yaml with this cache, and return its path."""
    content = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
    content["applications"][0].setdefault("args", {}).update(cache=cache)
    path = folder / f"{cache}.yaml"
    path.write_text(yaml.safe_dump(content), "utf-8")
    return path


def ask_for_the_hot_ones(service: Running, photos: Sequence[bytes]) -> None:
    """Send each of the images that will be asked for again."""
    with httpx.Client(base_url=service.url, timeout=60) as client:
        for image in range(NUM_HOT):
            client.post("/v1/classify", content=image_of(photos, image)).raise_for_status()


def load(
    service: Running, photos: Sequence[bytes], seconds: float, clients: int
) -> dict[str, float | None]:
    """Return the figures of one turn."""
    process = psutil.Process(service.process.pid)
    run = run_load(Load(Target(service.url, photos), seconds, clients=clients), process)
    summary = summarise(run, 100)
    if summary.errors:
        raise SystemExit(f"requests failed: {summary.errors}")
    return {
        "images_per_s": summary.images_per_s,
        "p50_ms": summary.p50_ms,
        "p99_ms": summary.p99_ms,
        "cpu_ms_per_image": summary.service_cpu_ms,
    }


def medians(rows: Sequence[dict[str, float | None]]) -> dict[str, Any]:
    """Return the median of each figure over the rounds."""
    return {
        name: round(median([value for row in rows if (value := row[name]) is not None]), 3)
        for name in rows[0]
    }


def check_it_was_cached(services: dict[str, Running], photos: Sequence[bytes]) -> None:
    """Fail if the services are not what they are taken for."""
    for cache, service in services.items():
        answer = httpx.post(f"{service.url}/v1/classify", content=image_of(photos, 0), timeout=60)
        if json.loads(answer.content).get("cached", False) != (cache != "none"):
            raise SystemExit(f"cache: {cache}, and the answer is {answer.text[:200]}")


if __name__ == "__main__":
    typer.run(main)
