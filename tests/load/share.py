"""The share of the bound that arrives at the HTTP client: ``python tests/load/share.py PHOTOS``.

One service and the same networks in this process take turns, round by round, on the same photos: 16
clients and forms of 16 photos against the best in-process setup, and one client against one image
alone. The bound is measured before and after every turn. Prints JSON.
"""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
from bound import Bound
from machine import describe, write_result
from running import running_service

from app.bench.load import Load, Target, photos_in, run_load
from app.bench.measurement import Summary, summarise
from calibration.offline import OneImage
from models.model_set import load_model_set

FILES = 16  # of the forms
ALTERNATIONS = 5  # of one image in process and one over HTTP, a round


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 10.0,
    config: Annotated[Path | None, typer.Option(help="of the service")] = None,
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure both in turns."""
    bodies = photos_in(photos)
    bound = Bound(bodies)
    with running_service(*(("--config", str(config)) if config else ())) as service:
        turns = AlternatingTurns(service.url, service.process.pid, bodies, bound, seconds)
        run_load(Load(turns.single, 5.0, clients=16), None)
        rows = [turns.round() for _ in range(rounds)]
    result = {
        "machine": describe(),
        "limit": bound.limit.as_json(),
        "median": {key: round(median(row[key] for row in rows), 3) for key in MEDIANS},
        "cpu_ms_by_stage": {
            stage: round(median(row["cpu_ms_by_stage"].get(stage, 0.0) for row in rows), 2)
            for stage in rows[0]["cpu_ms_by_stage"]
        },
        "rounds": rows,
    }
    write_result(result, out)


MEDIANS = ("share", "form_share", "overhead_ms", "images_per_s", "cpu_ms_per_image")


class AlternatingTurns:
    """One round after the other."""

    def __init__(
        self, url: str, pid: int, bodies: list[bytes], bound: Bound, seconds: float
    ) -> None:
        self.single = Target(url, bodies)
        self._forms = Target(url, bodies, files_per_request=FILES)
        self._root, self._bodies = psutil.Process(pid), bodies
        self._bound, self._seconds = bound, seconds
        self._alone = OneImage(load_model_set("imagenette"), "INT8")

    def round(self) -> dict[str, Any]:
        """Return one round's figures; a turn's bound is the mean of those before and after it."""
        before = self._bound.measure(self._seconds)
        many = self._load(self.single, clients=16)
        between = self._bound.measure(self._seconds)
        forms = self._load(self._forms, clients=2)
        after = self._bound.measure(self._seconds)
        alone_ms, http_ms = self._one_image()
        return {
            "bound_images_per_s": [before, between, after],
            "images_per_s": many.images_per_s,
            "share": round(2 * many.images_per_s / (before + between), 4),
            "cpu_ms_per_image": many.service_cpu_ms,
            "cpu_ms_by_stage": many.service_cpu_ms_by_stage,
            "client_cpu_ms": many.client_cpu_ms,
            "form_images_per_s": forms.images_per_s,
            "form_share": round(2 * forms.images_per_s / (between + after), 4),
            "in_process_ms": round(alone_ms, 2),
            "http_ms": round(http_ms, 2),
            "overhead_ms": round(http_ms - alone_ms, 2),
            "errors": many.errors | forms.errors,
        }

    def _one_image(self) -> tuple[float, float]:
        """Return the median ms of one image alone in this process, and of one client over HTTP.

        The two take short turns: what they differ by is less than the machine drifts in seconds.
        """
        alone, http = [], []
        for _ in range(ALTERNATIONS):
            alone.append(self._alone.measure(self._bodies, 20))
            one = self._load(self.single, clients=1, seconds=self._seconds / ALTERNATIONS)
            if one.errors or one.p50_ms is None:
                raise SystemExit(f"one client alone was not answered: {one.errors}")
            http.append(one.p50_ms)
        return median(alone), median(http)

    def _load(self, target: Target, clients: int, seconds: float | None = None) -> Summary:
        load = Load(target, seconds or self._seconds, clients=clients)
        return summarise(run_load(load, self._root), 100)


if __name__ == "__main__":
    typer.run(main)
