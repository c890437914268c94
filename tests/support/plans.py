"""Fast plans for sets of tests, which nothing was measured for."""

from datetime import date
from pathlib import Path

from calibration.sets.transaction import write_manifest
from models.ensemble import PlanFigures, PlanRecord, StepRecord, SureRecord
from models.manifest import read_manifest

FIGURES = PlanFigures(
    num_images=100,
    top1=0.9,
    top1_interval=(0.8, 0.95),
    full_top1=0.9,
    lost=0.0,
    lost_interval=(-0.01, 0.01),
    p_value=1.0,
    cpu_ms=1.0,
    full_cpu_ms=2.0,
)
Asks = tuple[tuple[tuple[str, ...], float | None], ...]  # members and stop_at of each step


def sure_from(probability: float) -> SureRecord:
    """Return a bound that nothing was measured for."""
    return SureRecord(
        probability=probability,
        target=0.9,
        num_images=100,
        share=0.5,
        right=0.95,
        right_interval=(0.9, 1.0),
    )


def plan_of(made_for, asks, *, bounds=(), temperatures=(), precision="INT8"):
    """Return a plan for networks by their key; ``bounds`` are of sure answers, by step."""
    steps = []
    for number, (ask, stop_at) in enumerate(asks):
        bound = bounds[number] if bounds else None
        steps.append(
            StepRecord(
                ask=ask,
                stop_at=stop_at,
                share=1 / len(asks),
                temperature=temperatures[number] if temperatures else 1.0,
                sure=None if bound is None else sure_from(bound),
            )
        )
    return PlanRecord(
        steps=tuple(steps),
        precision=precision,
        made_for=made_for,
        dataset="none",
        images_sha256="0" * 64,
        measured=date(2026, 1, 1),
        cpu="none",
        chosen=FIGURES,
        judged=FIGURES,
    )


def planned(folder: Path, *asks: tuple[tuple[str, ...], float | None], **facts: object) -> Path:
    """Give a set a plan; return its folder."""
    manifest = read_manifest(folder)
    plan = plan_of(manifest.plan_key("INT8"), asks, **facts)
    write_manifest(folder, manifest.model_copy(update={"fast_plan": plan}))
    return folder
