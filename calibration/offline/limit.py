"""``tandem bench --limit``: measures the upper bound, and prints every setup that was tried."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.offline.upper_bound import UpperBound, measure_upper_bound
from models.errors import ModelSetError
from models.model_set import load_model_set, search_path
from models.record import Precision

err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
out = Console(soft_wrap=True, highlight=False, emoji=False)


def run(
    bodies: list[bytes], model_set: str, precision: str, duration_s: float, *, quiet: bool
) -> dict[str, Any]:
    """Measure the bound, show it unless ``quiet``, and return it as plain values."""
    if precision not in ("INT8", "FP16"):
        raise ModelSetError(f"--precision {precision!r}: INT8 or FP16")
    chosen: Precision = "INT8" if precision == "INT8" else "FP16"
    loaded = load_model_set(model_set, search_path())
    with err.status("measuring") as status:
        bound = measure_upper_bound(
            loaded,
            bodies,
            chosen,
            seconds=duration_s / 5,
            report=lambda text: status.update(escape(text)),
        )
    if not quiet:
        show(out, bound)
    return {"model_set": loaded.name, "limit": bound.as_json()}


def show(console: Console, bound: UpperBound) -> None:
    """Print every setup that was tried, and the bound."""
    table = Table("streams", "threads each", "batch", "images/s")
    for setup, rate in bound.setups.items():
        cells = (str(setup.streams), str(setup.threads), str(setup.batch_size), f"{rate:.1f}")
        table.add_row(*cells, style="bold" if setup == bound.best else "")
    console.print(table)
    console.print(
        f"the bound of this machine, no server: [bold]{bound.images_per_s:.1f} images/s[/] "
        f"({bound.precision}, decode and every member); one image alone {bound.latency_ms:.1f} ms"
    )
