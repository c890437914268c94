"""Compares the forms of the graph: the same load, with stages in one process or in several."""

from dataclasses import dataclass

from app.errors import ConfigError
from app.planning.costs import FORMS, Form, planned_costs
from app.planning.plan import Costs, Plan, Requirements, plan
from models.manifest import Manifest
from models.record import Precision


@dataclass(frozen=True)
class PlannedForm:
    """What one form takes for a load; without a plan, why there is none."""

    form: Form
    costs: Costs
    plan: Plan | None
    why_not: str | None = None

    @property
    def name(self) -> str:
        """The form in words."""
        return FORMS[self.form]

    @property
    def cpu_ms(self) -> float:
        """CPU time of an image in all processes, in ms."""
        return sum(self.costs.cpu_ms.values()) + self.costs.around_ms

    @property
    def alone_ms(self) -> float:
        """How long one image takes when nothing else is there, in ms; in replicas as planned."""
        return (self.plan.costs if self.plan else self.costs).alone_ms


def compare_forms(
    needs: Requirements, manifest: Manifest, precision: Precision = "INT8"
) -> list[PlannedForm]:
    """Plan every form of the graph for the same load, with the costs that are expected of each."""
    return [_planned(needs, form, planned_costs(manifest, precision, form)) for form in FORMS]


def _planned(needs: Requirements, form: Form, costs: Costs) -> PlannedForm:
    try:
        return PlannedForm(form, costs, plan(needs, costs))
    except ConfigError as error:
        return PlannedForm(form, costs, None, str(error))
