"""Renders an evaluation as an HTML page that loads nothing from elsewhere."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from calibration.evaluation.cascade import SUGGESTED_WITHIN, cheapest_within
from calibration.evaluation.evaluate import Evaluation
from calibration.evaluation.reports import plots
from calibration.evaluation.reports.cascade import points_of
from calibration.evaluation.reports.html import rendered
from calibration.evaluation.reports.subset_plot import subsets_svg
from calibration.evaluation.reports.tables import points
from models.accuracy import ENSEMBLE
from models.model_set import ModelSet
from models.record import Precision
from models.result_files import write_result


def write_page(
    path: Path, model_set: ModelSet, content: dict[str, Any], measured: Evaluation
) -> None:
    """Write the page in one step; ``content`` is the content of ``--json``."""
    precision: Precision = "INT8" if "INT8" in measured.tallies else "FP16"
    tallies = measured.tallies[precision]
    lead = tallies.get(ENSEMBLE) or next(iter(tallies.values()))
    page = rendered(
        "calibration.evaluation.reports",
        "report.html.j2",
        r=content,
        points=points,
        precision=precision,
        lead=next(name for name, tally in tallies.items() if tally is lead),
        names=[*content["fingerprints"], ENSEMBLE],
        num_classes=len(model_set.labels),
        max_classes=plots.MAX_CLASSES,
        # matplotlib escapes what it draws: labels come from the set's files.
        per_class=Markup(plots.per_class(tallies, model_set.labels)),
        confusion=Markup(plots.confusion(lead, model_set.labels)),
        cascade=Markup(_cascade(measured, precision)),
        reliability=Markup(plots.reliability(tallies)),
        subsets=Markup(subsets_svg(measured.subsets) if measured.subsets else ""),
    )
    write_result(path, page)


def _cascade(measured: Evaluation, precision: Precision) -> str:
    """Plot the cascade's curve and each member alone; "" without a cascade."""
    if precision not in measured.cascades:
        return ""
    curve = points_of(measured, precision)
    alone = {
        name: (measured.cpu_ms_per_image[name][precision], tally.top1)
        for name, tally in measured.tallies[precision].items()
        if name != ENSEMBLE
    }
    return plots.cascade(curve, cheapest_within(curve, SUGGESTED_WITHIN), alone)
