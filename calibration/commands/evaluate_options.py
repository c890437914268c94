"""The options of ``tandem evaluate``, and their checks before hours of work."""

from dataclasses import dataclass
from pathlib import Path

from models.errors import ModelSetError


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of the command line."""

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
    if named := [option for option, is_given in asked.items() if is_given]:
        raise ModelSetError(
            f"{' and '.join(named)}: of classes that exclude each other, and this set is "
            "multi-label; leave it out (--json has all figures)"
        )
