"""Calls in closed loops, power, and memory."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from calibration.ladder.ladder import figures_of, memory_mib, run_calls
from models import machine
from models.machine import PackagePower, UseSample, sampled
from tests.support.cases import cases
from tests.support.hand_clock import HandClock

LARGEST = 10_000_000
ZONES = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "psys"}


def test_every_caller_calls_from_a_thread_of_its_own():
    seen: set[int] = set()
    both = threading.Barrier(2, timeout=60)

    def call() -> None:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both.wait()  # one after the other would wait for ever

    run = run_calls([call, call], 0.05, 3, 2)
    assert len(seen) == 2
    assert run.num_images >= 6
    assert run.seconds >= 0.05


def test_a_long_call_counts_once_and_an_error_ends_all_callers():
    done = threading.Event()
    run = run_calls([lambda: done.wait(0.05)], 0.001, 1, 1)
    assert run.num_images == 1
    assert run.p50_ms >= 40

    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_calls([fail, lambda: None], 600, 1, 1)


def test_utilisation_is_of_the_cores():
    def busy() -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    run = run_calls([busy], 0.5, 1, 1000)
    assert 0 < run.utilisation < 0.1  # of a thousand cores
    assert run.cpu_ms_per_image > 1


def test_figures_are_by_image_and_power_is_that_of_the_run(monkeypatch):
    monkeypatch.setattr(PackagePower, "watts", lambda _: 12.0)
    assert run_calls([lambda: None], 0.01, 1, 1).watts == 12.0
    samples = [UseSample(0.2, 3.0), UseSample(0.4, None), UseSample(0.3, 4.0)]
    figures = figures_of([0.1, 0.2, 0.3], 2.0, 1.5, samples, 10)
    assert (figures.images_per_s, figures.p50_ms) == (15.0, 200.0)
    assert (figures.cpu_ms_per_image, figures.num_images) == (50.0, 30)
    assert figures.utilisation == pytest.approx(0.3)
    assert (figures.utilisation_spread, figures.watts) == (pytest.approx(0.0816), 3.5)
    assert figures.rss_mib > 1


def test_a_run_too_short_to_be_sampled_has_its_mean(monkeypatch):
    spent_s, now_s = iter([1.0, 4.0]), iter([0.0, 2.0])
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(now_s)))
    with sampled(60, 2, lambda: next(spent_s)) as samples:
        pass
    assert [sample.share for sample in samples] == [0.75]


def test_memory_of_processes_where_the_kernel_says_pss_and_where_it_hides_it():
    class Process:
        def __init__(self, **mib: int) -> None:
            self.info = SimpleNamespace(**{name: n * 2**20 for name, n in mib.items()})

        def memory_full_info(self) -> SimpleNamespace:
            return self.info

    class Ended(Process):
        def memory_full_info(self) -> SimpleNamespace:
            raise psutil.NoSuchProcess(1)

    processes: list[Any] = [Process(rss=4, pss=2), Process(rss=3, pss=1), Ended(), Process(rss=4)]
    assert memory_mib(processes[:3]) == (3.0, 7.0)
    assert memory_mib(processes[3:]) == (None, 4.0)


def zone(folder: Path, name: str, kind: str, energy: int | str, largest: int | str) -> Path:
    place = folder / name
    place.mkdir()
    (place / "name").write_text(f"{kind}\n")
    (place / "energy_uj").write_text(f"{energy}\n")
    (place / "max_energy_range_uj").write_text(f"{largest}\n")
    return place


@cases(
    "zones, before, after, largest, watts",
    (ZONES, 5, 3_000_005, LARGEST, 1.5),  # no part or platform counts twice
    ({"a:0": "package-0"}, 0, 1, LARGEST, None),  # not RAPL's
    ({"intel-rapl:0": "package-0"}, 9_000_000, 3_000_000, LARGEST, 2.0),
    ({"intel-rapl:0": "package-0"}, 9, 3, "", None),  # begun again, and nobody knows at what
    ({}, 0, 0, LARGEST, None),
)
def test_watts_are_joules_over_seconds(tmp_path, zones, before, after, largest, watts) -> None:
    clock = HandClock()
    places = [zone(tmp_path, name, kind, before, largest) for name, kind in zones.items()]
    power = PackagePower(tmp_path, clock)
    clock.now += 2
    for place in places:
        (place / "energy_uj").write_text(str(after))
    assert power.watts() == pytest.approx(watts)


def test_every_package_counts(tmp_path: Path) -> None:
    clock = HandClock()
    places = [zone(tmp_path, f"intel-rapl:{i}", f"package-{i}", 0, LARGEST) for i in range(2)]
    power = PackagePower(tmp_path, clock)
    clock.now += 1
    for i, place in enumerate(places):
        (place / "energy_uj").write_text(str(3_000_000 * (i + 1)))
    assert power.watts() == 9.0


def test_what_only_root_may_read_is_absent(tmp_path: Path, monkeypatch) -> None:
    clock = HandClock()
    zone(tmp_path, "intel-rapl:0", "package-0", 0, LARGEST)
    read = Path.read_text

    def refuse(file: Path, *args: str) -> str:
        if file.name == "energy_uj":  # as root, which tests may be, a mode forbids nothing
            raise PermissionError(13, "Permission denied", str(file))
        return read(file, *args)

    monkeypatch.setattr(Path, "read_text", refuse)
    power = PackagePower(tmp_path, clock)
    clock.now += 1
    assert power.watts() is None
