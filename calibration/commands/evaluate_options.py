"""What ``tandem evaluate`` is asked for, and the checks before hours of work."""

import os
from dataclasses import dataclass
from pathlib import Path

from models.errors import ModelSetError


@dataclass(frozen=True)
class EvaluateOptions:
    """What the command line asks for."""

    images: Path
    url: str | None  # of a service that must answer as in process
    max_images: int  # 0: all
    is_recorded: bool
    json_file: Path | None  # -: stdout
    html: Path | None
    model_dirs: tuple[Path, ...]
    key_file: Path | None = None  # of the service
    has_subsets: bool = False
    plot: Path | None = None  # of them
    is_calibrated: bool = False  # temperatures are fitted, and nothing else
    sure_at: float | None = None  # when an answer is sure is chosen, and nothing else


def check_can_write(path: Path | None) -> None:
    """Find out before hours of work that the result has nowhere to go."""
    if path is None or str(path) == "-":
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ModelSetError(f"cannot write {path}: give a file in a folder that exists")
    place = path if path.exists() else path.absolute().parent
    if not os.access(place, os.W_OK):
        raise ModelSetError(f"cannot write {path}: {place} is read-only; give another file")


def check_plot_options(options: EvaluateOptions) -> None:
    """Refuse a plot of nothing, or one that cannot be drawn."""
    from calibration.evaluation.reports.subset_plot import check_plot  # brings matplotlib

    assert options.plot is not None
    if not options.has_subsets:
        raise ModelSetError("--plot draws what --subsets compares: give both")
    check_plot(options.plot)


def check_multi_label(options: EvaluateOptions) -> None:
    """Refuse what has no meaning for scores of each class by itself, or no plot yet."""
    asked = {
        "--subsets": options.has_subsets,
        "--html": options.html is not None,
    }
    if given := [option for option, is_given in asked.items() if is_given]:
        raise ModelSetError(
            f"{' and '.join(given)}: of classes that exclude each other, and this set is "
            "multi-label; leave it out (--json has all figures)"
        )
