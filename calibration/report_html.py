"""An evaluation as one page: the tables and plots, nothing loaded from elsewhere."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from calibration import plots
from calibration.evaluate import Evaluation
from models.accuracy import ENSEMBLE
from models.model_set import ModelSet
from models.record import Precision

TEMPLATE = "report.html.j2"


def write_page(
    path: Path, model_set: ModelSet, content: dict[str, Any], measured: Evaluation
) -> None:
    """Write the page in one step; ``content`` is what ``--json`` writes."""
    precision: Precision = "INT8" if "INT8" in measured.tallies else "FP16"
    tallies = measured.tallies[precision]
    lead = tallies.get(ENSEMBLE) or next(iter(tallies.values()))
    environment = Environment(
        loader=PackageLoader("calibration", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["points"] = lambda fraction: f"{fraction * 100:+.2f}"
    text = environment.get_template(TEMPLATE).render(
        r=content,
        precision=precision,
        lead=next(name for name, tally in tallies.items() if tally is lead),
        names=[*content["fingerprints"], ENSEMBLE],
        num_classes=len(model_set.labels),
        max_classes=plots.MAX_CLASSES,
        # matplotlib escapes what it draws: labels come from the set's files.
        per_class=Markup(plots.per_class(tallies, model_set.labels)),
        confusion=Markup(plots.confusion(lead, model_set.labels)),
        reliability=Markup(plots.reliability(tallies)),
    )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, "utf-8", "replace")  # a file's name need not be UTF-8
    partial.replace(path)
