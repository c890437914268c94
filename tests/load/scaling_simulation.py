"""Our autoscaling and Serve's default: ``python tests/load/scaling_simulation.py --json FILE``.

Both get the same loads. Simulated (tests/support/scaled_simulation.py), so it takes a minute and no
cluster. The stages are those of configs/cluster.yaml with the costs of
tests/load/results/ladder.json. Writes JSON and, beside it, a plot of rate, replicas,
images under way and p99.
"""

import json
import math
from collections.abc import Callable
from operator import ge
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from machine import ROOT, describe
from matplotlib.figure import Figure
from serve_default import ServeDefault

from app.serve.scaling import ScalingOptions
from tests.support.scaled_simulation import (
    Autoscaler,
    ScaledOutcome,
    ScaledService,
    ScaledSimulation,
    ScaledStage,
)
from tests.support.simulated_policy import PolicyAutoscaler

COST_MS = {"Gateway": 6.2, "Decoder": 5.1, "resnet50": 18.9, "densenet169": 18.4}
CORES = {"Gateway": 1.0, "Decoder": 2.0, "resnet50": 4.0, "densenet169": 4.0}
# What the file had for Serve's default before; for the Gateway, what one core has under way.
TARGET_ONGOING = {"Gateway": 16.0, "Decoder": 8.0, "resnet50": 16.0, "densenet169": 16.0}
P99_MS = 100.0
UTILIZATION = ScalingOptions().target_utilization
WINDOW_S = 5
STEP_AT_S, STEP_END_S = 120.0, 420.0

Rate = Callable[[float], float]  # images/s at a time
LOADS: dict[str, tuple[float, float, Rate]] = {  # seconds, highest rate, rate
    "constant": (600, 300, lambda at: 300),
    "step": (720, 600, lambda at: 600 if STEP_AT_S <= at < STEP_END_S else 120),
    "diurnal": (1200, 800, lambda at: 440 - 360 * math.cos(2 * math.pi * at / 1200)),
    "spike": (480, 1000, lambda at: 1000 if 120 <= at < 140 else 200),
}
POLICIES: dict[str, Callable[[ScaledService], Autoscaler]] = {
    "tandem": PolicyAutoscaler,
    "serve default": lambda service: ServeDefault(service, TARGET_ONGOING),
}
COLORS = {"tandem": "#1b6f5f", "serve default": "#c8703a"}


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
    seed: Annotated[int, typer.Option(help="of arrivals and routing")] = 20,
) -> None:
    """Play every load with both policies."""
    service, outcomes = _service(), {}
    for load, (seconds, highest, rate) in LOADS.items():
        arrivals = _poisson(rate, highest, seconds, seed)
        for policy, make in POLICIES.items():
            run = ScaledSimulation(service, make(service), seed).run(arrivals, seconds)
            outcomes[load, policy] = run
            typer.echo(f"{load}, {policy}: {_summary(load, run)}")
    result = {
        "machine": describe(),
        "seed": seed,
        "start_s": service.start_s,
        "cpu_ms": COST_MS,
        "target_ongoing_requests": TARGET_ONGOING,
        "runs": [
            {"load": load, "policy": policy} | _summary(load, run)
            for (load, policy), run in outcomes.items()
        ],
    }
    if json_file:
        json_file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
        _plot(json_file.with_suffix(".png"), outcomes)


def _service() -> ScaledService:
    """Return the stages of configs/cluster.yaml with its limits."""
    content = yaml.safe_load((ROOT / "configs" / "cluster.yaml").read_text("utf-8"))
    stages = {}
    for deployment in content["applications"][0]["deployments"]:
        name, scaling = deployment["name"], deployment["autoscaling_config"]
        low, high = scaling["min_replicas"], scaling["max_replicas"]
        batch = 8 if name in ("resnet50", "densenet169") else 1
        stages[name] = ScaledStage(COST_MS[name], CORES[name], low, batch, low, high)
    return ScaledService(stages, (("Gateway",), ("Decoder",), ("resnet50", "densenet169")))


def _poisson(rate: Rate, highest: float, seconds: float, seed: int) -> list[float]:
    """Return arrivals of a Poisson process whose rate changes, by thinning."""
    rng = np.random.default_rng(seed)
    number = rng.poisson(highest * seconds)
    times = np.sort(rng.uniform(0, seconds, number)).tolist()
    kept = rng.uniform(0, highest, number).tolist()
    return [at for at, drawn in zip(times, kept, strict=True) if drawn < rate(at)]


def _summary(load: str, run: ScaledOutcome) -> dict[str, Any]:
    lost = len(run.refused) + len(run.late)
    found = {
        "images": len(run.answered) + lost,
        "lost": lost,
        "p99_ms": round(run.p99_ms(), 1),
        "core_seconds": round(run.core_seconds),
        "changes": run.num_changes,
        "most_under_way": max(run.under_way),
    }
    return found | (_after_the_step(run) if load == "step" else {})


def _after_the_step(run: ScaledOutcome) -> dict[str, float | None]:
    """Say when each thing happened, in s after the step."""
    start, end = int(STEP_AT_S), int(STEP_END_S)
    targets = [tuple(of[second] for of in run.targets.values()) for second in range(end)]
    grown = [at for at in range(start, end) if sum(targets[at]) > sum(targets[start - 1])]
    enough = tuple(_needed(stage, LOADS["step"][1]) for stage in run.targets)
    carried = [at for at in range(start, end) if all(map(ge, targets[at], enough))]
    last = max(sum(now) for now in targets[start:])
    complete = [at for at in range(start, end) if sum(targets[at]) == last]
    p99_ms = _p99_by_window(run, end)
    slow = [n for n in range(start // WINDOW_S, end // WINDOW_S) if p99_ms[n] > P99_MS]
    return {
        "first_decision_s": grown[0] - start if grown else None,
        "enough_decided_s": carried[0] - start if carried else None,
        "last_decision_s": complete[0] - start if grown else None,
        "p99_kept_again_s": (max(slow) + 1) * WINDOW_S - start if slow else 0,
    }


def _needed(stage: str, rate: float) -> int:
    """Return the replicas of which ``rate`` images/s use the policy's share of the cores."""
    return math.ceil(rate * COST_MS[stage] / (CORES[stage] * 1e3 * UTILIZATION))


def _p99_by_window(run: ScaledOutcome, seconds: float) -> list[float]:
    """Return the p99 in ms of what arrived in each window; NaN where nothing was answered."""
    windows: list[list[float]] = [[] for _ in range(math.ceil(seconds / WINDOW_S))]
    for arrived, latency in run.answered:
        if arrived < seconds:
            windows[int(arrived // WINDOW_S)].append(latency)
    return [float(np.percentile(of, 99)) * 1e3 if of else math.nan for of in windows]


def _plot(path: Path, outcomes: dict[tuple[str, str], ScaledOutcome]) -> None:
    figure = Figure(figsize=(13, 8))
    axes = figure.subplots(4, len(LOADS), sharex="col")
    rows = ("offered, images/s", "ready replicas, all stages", "images under way", "p99, ms")
    for column, (load, (seconds, _, rate)) in enumerate(LOADS.items()):
        of_load = axes[:, column]
        seconds_of = np.arange(seconds)
        of_load[0].plot(seconds_of, [rate(at) for at in seconds_of], color="#555555", lw=1)
        of_load[0].set_title(load, loc="left")
        for policy in POLICIES:
            run, color = outcomes[load, policy], COLORS[policy]
            lost = len(run.refused) + len(run.late)
            ready = np.sum(list(run.replicas.values()), axis=0)
            times = 1 + np.arange(len(ready))
            told = f"{policy}: {run.core_seconds / 1e3:.1f} k core-s, {lost} lost"
            of_load[1].plot(times, ready, color=color, lw=1.3, label=told)
            of_load[2].plot(times, run.under_way, color=color, lw=1)
            p99 = _p99_by_window(run, seconds)
            of_load[3].plot(WINDOW_S * (0.5 + np.arange(len(p99))), p99, color=color, lw=1)
        of_load[1].legend(frameon=False, fontsize=7.5, loc="lower left", bbox_to_anchor=(0, 0.98))
        of_load[3].axhline(P99_MS, color="#999999", lw=0.8, ls="--")
        of_load[3].set_yscale("log")
        of_load[3].set_xlabel("s")
        for row in (0, 1):
            of_load[row].set_ylim(bottom=0)
        of_load[2].set_yscale("symlog", linthresh=10)
        of_load[2].set_ylim(bottom=0)
    for row, told in enumerate(rows):
        axes[row, 0].set_ylabel(told)
        for one in axes[row]:
            one.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
