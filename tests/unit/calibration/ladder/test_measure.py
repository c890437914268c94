"""Calls in closed loops: counted, timed, and ended by the first error."""

import threading
import time

import pytest

from calibration.ladder.measure import Calls, figures_of, memory_mib, run_calls
from calibration.ladder.rung import RungError


def test_every_caller_calls_from_a_thread_of_its_own():
    seen: set[int] = set()
    both = threading.Barrier(2, timeout=60)

    def call() -> None:
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both.wait()  # one after the other would wait for ever

    run = run_calls([call, call], 0.05, 2)
    assert len(seen) == 2
    assert len(run.latencies_s) >= 2
    assert run.seconds >= 0.05


def test_a_call_longer_than_the_run_counts_once():
    done = threading.Event()

    def call() -> None:
        done.wait(0.05)

    run = run_calls([call], 0.001, 1)
    assert len(run.latencies_s) == 1
    assert run.latencies_s[0] >= 0.04


def test_an_error_ends_all_callers():
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_calls([fail, lambda: None], 600, 1)


def test_utilisation_is_of_the_cores():
    def busy() -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    run = run_calls([busy], 0.5, 1000)
    assert run.utilisation
    assert all(0 <= share < 0.1 for share in run.utilisation)  # of a thousand cores
    assert run.cpu_s > 0.01


def test_figures_are_by_image():
    run = Calls(2.0, [0.1, 0.2, 0.3], 1.5, [0.2, 0.4])
    figures = figures_of(run, batch=10, cores=2)
    assert figures.images_per_s == 15.0
    assert figures.p50_ms == 200.0
    assert figures.cpu_ms_per_image == 50.0
    assert figures.num_images == 30
    assert figures.utilisation == pytest.approx(0.3)
    assert figures.utilisation_spread == pytest.approx(0.1)
    assert figures.rss_mib > 1


def test_a_run_too_short_to_be_sampled_has_its_mean():
    figures = figures_of(Calls(2.0, [1.0], 3.0), batch=1, cores=2)
    assert (figures.utilisation, figures.utilisation_spread) == (0.75, 0.0)


def test_no_call_is_nothing_to_measure():
    with pytest.raises(RungError, match="no call ended"):
        figures_of(Calls(1.0), 1, 1)


def test_memory_where_the_kernel_tells_and_where_it_does_not(tmp_path):
    smaps = tmp_path / "smaps_rollup"
    smaps.write_text(
        "00-ff ---p 00:00 0 [rollup]\nRss: 4096 kB\nPss:    2048 kB\nPss_Dirty: 1 kB\n"
    )
    assert memory_mib(smaps)[0] == 2.0
    pss, rss = memory_mib(tmp_path / "none")
    assert pss is None
    assert rss > 1
