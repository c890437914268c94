"""Costs for a plan: the CPU time of an image by stage, recorded or measured.

Recorded costs depend on the form of the graph, so forms are compared here too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from calibration.planning.plan import Costs, Plan, PlanError, Requirements, plan
from models.ledger import records_of_networks
from models.manifest import Manifest
from models.record import Precision
from models.stage_costs import (
    AROUND_CPU_MS,
    MEMBER_APART,
    decoder_cpu_ms,
    gateway_cpu_ms,
    measured_cpu_ms,
    member_cpu_ms,
)

AROUND = ("Ray", "HAProxy")  # the names in results of tandem bench
MAX_CPU_MS = 1e6  # of an image in a stage; higher values are no measurement
REST = "photos of 15 to 240 KB on two cores with AVX512-VNNI and AMX"

Form = Literal["whole", "members", "stages"]
FORMS: Mapping[Form, str] = {
    "whole": "whole graphs side by side",
    "members": "members apart",
    "stages": "all stages apart",
}


def planned_costs(manifest: Manifest, precision: Precision, form: Form = "whole") -> Costs:
    """Return the expected cost of each stage, for a plan with this form of the graph."""
    members = tuple(member.name for member in manifest.members)
    gateway_ms = gateway_cpu_ms(
        manifest, precision, decodes=form != "stages", has_members=form == "whole"
    )
    cpu_ms = {"Gateway": gateway_ms}
    if form == "stages":
        cpu_ms["Decoder"] = decoder_cpu_ms(manifest)
    of_members = member_cpu_ms(manifest, precision)
    if form != "whole":
        cpu_ms |= {name: MEMBER_APART * ms for name, ms in of_members.items()}
    measured = measured_cpu_ms(manifest, precision)
    used = [(name, manifest.member(name).precision_of(precision)) for name in measured]
    records = [
        record
        for record in records_of_networks(manifest)
        if any(runs in record.cpu_ms_per_image.get(name, {}) for name, runs in used)
    ]
    on = f"on {records[-1].cpu}, {records[-1].measured}" if measured else "none: a guess"
    if measured and (guessed := [name for name in members if name not in measured]):
        on += f" (a guess for {', '.join(guessed)})"
    source = f"of {manifest.name}'s members ({precision}) its record, {on}; of the rest, {REST}"
    inside = of_members if form == "whole" else {}
    return Costs(cpu_ms, members, AROUND_CPU_MS, source, inside)


def read_costs(path: Path, members: tuple[str, ...]) -> Costs:
    """Read the CPU time by stage from the last run in a result of ``tandem bench --json``.

    A result of tests/load/share.py works as well.

    Raises:
        PlanError: the result has no such times, or is of other members.

    """
    try:
        content = json.loads(path.read_text("utf-8"))
        by_stage = content.get("cpu_ms_by_stage") or content["runs"][-1]["service_cpu_ms_by_stage"]
        of = {str(stage): float(ms) for stage, ms in by_stage.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{path} has no CPU time by stage ({type(error).__name__}: {error}); make one on a "
            f"machine like your nodes: tandem bench --concurrency 16 --json {path.name}"
        ) from error
    wrong = [f"{stage}: {ms:g} ms" for stage, ms in of.items() if not 0 < ms <= MAX_CPU_MS]  # NaN
    around_ms = sum(of.pop(name, 0.0) for name in AROUND)
    known = {"Gateway", "Decoder", "Combiner", *members}
    is_whole = not set(members) & set(of) or set(members) <= set(of)
    if wrong:
        raise PlanError(
            f"{path} has the stages {', '.join(wrong)} an image; it must be above 0 and at most "
            f"{MAX_CPU_MS:g}: measure again with tandem bench"
        )
    if "Gateway" not in of or not set(of) <= known or not is_whole:
        raise PlanError(
            f"{path} has the stages {', '.join(of) or 'none'}; it needs the Gateway and no others "
            f"than Decoder, Combiner and the set's members ({', '.join(members)}), all or none"
        )
    machine = content.get("machine") or {}
    source = f"{path.name}, on {machine.get('cpu', '?')}, {machine.get('cores', '?')} cores"
    return Costs(of, members, around_ms, source)


@dataclass(frozen=True)
class PlannedForm:
    """The plan for a form of the graph, or why there is none."""

    form: Form
    costs: Costs
    plan: Plan | None
    why_not: str | None = None

    @property
    def name(self) -> str:
        """The form as text."""
        return FORMS[self.form]

    @property
    def cpu_ms(self) -> float:
        """CPU time of an image in all processes, in ms."""
        return sum(self.costs.cpu_ms.values()) + self.costs.around_ms

    @property
    def alone_ms(self) -> float:
        """Latency of a single image without other load, in ms, with the planned replicas."""
        return (self.plan.costs if self.plan else self.costs).alone_ms


def compare_forms(needs: Requirements, manifest: Manifest) -> list[PlannedForm]:
    """Plan every form of the graph for the same load, each with its expected costs."""
    return [_planned(needs, form, planned_costs(manifest, "INT8", form)) for form in FORMS]


def _planned(needs: Requirements, form: Form, costs: Costs) -> PlannedForm:
    try:
        return PlannedForm(form, costs, plan(needs, costs))
    except PlanError as error:
        return PlannedForm(form, costs, None, str(error))
