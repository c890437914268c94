"""The last rung: the whole service over HTTP, started, loaded and stopped."""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean, pstdev

import httpx
import psutil
import yaml

from app.bench.client import Target
from app.bench.generator import Progress, run_load
from app.bench.load import Load, drawn_photos
from app.bench.process_tree import cpu_seconds
from app.bench.samples import summarise
from app.compute.child_process import Child, last_words
from app.errors import ConfigError
from app.ladder.job import LadderJob
from app.ladder.power import PackagePower
from app.ladder.process import child
from app.ladder.store import Store, write_whole
from app.launch.config import ServeConfig, default_config
from app.launch.ports import free_port
from calibration.ladder.rung import Figures, RungOptions, RungResult

START_S = 240.0
STOP_S = 60.0
SAMPLE_S = 0.5
CLIENTS_PER_CORE = 8
WARM_UP = 0.3  # of the run's time
MIB = 2**20
START = "from app.cli.main import main; main()"


def run_service_rung(job: LadderJob, store: Store, cascade_margin: float | None) -> RungResult:
    """Start ``tandem serve`` with the ladder's set, load it, and stop it.

    It is the configuration that ``tandem serve`` takes, on a free port of loopback, with
    ``cascade_margin`` if one is given.
    """
    port, log = free_port(), store.log("service")
    config = _configuration(job, port, cascade_margin)
    config_file = store.folder / "serve.yaml"
    write_whole(config_file, yaml.safe_dump(config.as_dict(), sort_keys=False))
    line = [sys.executable, "-P", "-c", START, "serve", "--config", str(config_file)]
    started = time.monotonic()
    with log.open("wb") as printed, child(line, printed) as process:
        try:
            if problem := _wait_ready(config.url, process):
                return RungResult(outcome="failed", reason=f"{problem}: {last_words(log)}")
            prepared_s = time.monotonic() - started
            figures = _measured(job, config.url, process.pid)
            figures = figures.model_copy(update=_top1(config.url, store.folder))
        finally:
            process.interrupt(STOP_S)  # as Ctrl-C does
    clients = CLIENTS_PER_CORE * job.cores
    margin = "no cascade" if cascade_margin is None else f"cascade_margin {cascade_margin:g}"
    return RungResult(
        outcome="measured",
        chosen=RungOptions(callers=clients, precision="INT8", cascade_margin=cascade_margin),
        figures=figures,
        prepared_s=round(prepared_s, 1),
        notes=(f"{clients} clients, JPEGs; decoding and HTTP are in it; {margin}",),
    )


def _configuration(job: LadderJob, port: int, cascade_margin: float | None) -> ServeConfig:
    config = ServeConfig.read(default_config()).with_overrides(
        model_set=str(job.network.model_set), host="127.0.0.1", port=port
    )
    more = {} if cascade_margin is None else {"cascade_margin": cascade_margin}
    return config.with_arguments(allow_unverified=True, cache="none", **more)


def _wait_ready(url: str, process: Child) -> str:
    """Wait until the service is ready; return what is wrong if it is not, and the log tells why."""
    deadline = time.monotonic() + START_S
    with httpx.Client(base_url=url, timeout=5, trust_env=False) as client:
        while time.monotonic() < deadline:
            if process.has_ended:
                return f"the service ended ({process.how_ended()})"
            with suppress(httpx.HTTPError):
                if client.get("/readyz").status_code == 200:
                    return ""
            time.sleep(0.5)
    return f"the service was not ready within {START_S:g} s"


def _measured(job: LadderJob, url: str, pid: int) -> Figures:
    """Load the service as long as every rung is, and return what that gave."""
    root, seconds = psutil.Process(pid), job.asked.seconds
    clients = CLIENTS_PER_CORE * job.cores
    target = Target(url, _bodies(job))
    run_load(Load(target, max(1.0, WARM_UP * seconds), clients=clients), None)
    power = PackagePower()
    utilisation = _Utilisation(root, job.cores)
    run = run_load(Load(target, seconds, clients=clients), root, utilisation.sample)
    watts = power.total_watts()
    summary = summarise(run, objective_ms=1000)
    if not summary.num_ok or summary.p50_ms is None:
        errors = ", ".join(f"{number} {kind}" for kind, number in summary.errors.items())
        raise ConfigError(f"the service answered nothing: {errors or 'no request ended'}")
    shares = utilisation.shares or [0.0]
    pss_mib, rss_mib = _memory(root)
    return Figures(
        images_per_s=summary.images_per_s,
        p50_ms=summary.p50_ms,
        cpu_ms_per_image=summary.service_cpu_ms or 0.0,
        utilisation=round(fmean(shares), 4),
        utilisation_spread=round(pstdev(shares), 4),
        pss_mib=pss_mib,
        rss_mib=rss_mib,
        num_images=summary.num_ok,
        seconds=summary.duration_s,
        watts=watts,
    )


def _bodies(job: LadderJob) -> list[bytes]:
    """Return the photos to send: the labelled ones, or drawn ones."""
    files = _labelled(job.work)
    return [path.read_bytes() for path, _ in files] if files else drawn_photos()


def _labelled(work: Path) -> list[tuple[Path, int]]:
    """Return the labelled files and their classes, as the preparation noted them."""
    try:
        noted = json.loads((work / "labelled.json").read_text("utf-8"))
    except (OSError, ValueError):
        return []
    return [(Path(path), int(index)) for path, index in noted]


def _top1(url: str, work: Path) -> dict[str, float | int]:
    """Ask the service for every labelled image; return the fields of :class:`Figures`."""
    files = _labelled(work)
    if not files:
        return {}
    num_right = 0
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for path, index in files:
            answer = client.post("/v1/classify", params={"top_k": 1}, content=path.read_bytes())
            if answer.status_code == 200:
                num_right += answer.json()["predictions"][0]["index"] == index
    return {"top1": round(num_right / len(files), 4), "num_labelled": len(files)}


def _memory(root: psutil.Process) -> tuple[float, float]:
    """Return PSS and RSS of the service's processes, in MiB."""
    pss = rss = 0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            info = process.memory_full_info()
            pss, rss = pss + info.pss, rss + info.rss
    return round(pss / MIB, 1), round(rss / MIB, 1)


class _Utilisation:
    """Samples how busy a process and all below it keep the cores, as a load goes on."""

    def __init__(self, root: psutil.Process, cores: int) -> None:
        self.shares: list[float] = []
        self._root, self._cores = root, cores
        self._before = self._read()

    def sample(self, _: Progress) -> None:
        """Note the share of the cores since the sample before, unless that was just now."""
        (spent_s, at_s), now = self._before, self._read()
        if now[1] - at_s >= SAMPLE_S:
            self.shares.append(max(0.0, now[0] - spent_s) / (now[1] - at_s) / self._cores)
            self._before = now

    def _read(self) -> tuple[float, float]:
        return sum(cpu_seconds(self._root).values()), time.monotonic()
