"""Runs ``tandem evaluate --calibrate`` and ``--sure-at``: what they fit goes into the manifest.

It also checks the options of ``tandem evaluate`` before hours of work.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.markup import escape

from calibration.commands.models import err, out
from calibration.datasets import Dataset, LabelledImage
from calibration.evaluation.evaluate import evaluate_set
from calibration.evaluation.fitting import Fitted, SureFit, TemperatureFit, with_temperatures
from calibration.evaluation.inference import Track
from calibration.evaluation.report_subsets import figures_table
from calibration.sets.transaction import change
from models.errors import ModelSetError
from models.files import write_json
from models.manifest import ENSEMBLE, Manifest, read_manifest
from models.model_set import ModelSet
from models.record import Precision


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


def command_of(options: EvaluateOptions) -> str:
    """Return what makes a new version of the set."""
    return f"tandem evaluate {'--calibrate' if options.is_calibrated else '--sure-at'}"


def check_calibrate_options(options: EvaluateOptions, model_set: ModelSet) -> None:
    """Refuse what has no meaning with ``--calibrate`` or ``--sure-at``."""
    option, what = ("--calibrate", "fits temperatures")
    if not options.is_calibrated:
        option, what = ("--sure-at", "chooses when an answer is sure")
    if model_set.manifest.task == "multi_label":
        raise ModelSetError(
            f"{option}: {model_set.name} is multi-label, and it {what} of classes that exclude "
            "each other; leave it out"
        )
    others = {
        "--subsets": options.has_subsets,
        "--url": options.url is not None,
        "--html": options.html is not None,
        "--sure-at": options.is_calibrated and options.sure_at is not None,
    }
    if others_given := [name for name, is_given in others.items() if is_given]:
        raise ModelSetError(
            f"{' and '.join(others_given)}: {option} {what} and evaluates nothing else; "
            "evaluate again afterwards"
        )


def calibrate(
    model_set: ModelSet,
    dataset: Dataset,
    precision: Precision,
    options: EvaluateOptions,
    track: Track[LabelledImage],
) -> None:
    """Fit temperatures on half of the images, judge on the other half, write them.

    Raises:
        ModelSetError: too few images, or the set was changed meanwhile.

    """
    names = [*(member.name for member in model_set.manifest.members), ENSEMBLE]
    plain = with_temperatures(model_set.manifest, dict.fromkeys(names, 1.0))
    fit = TemperatureFit(plain, precision)
    evaluate_set(
        ModelSet(model_set.folder, plain), dataset, (precision,), track=track, observe=fit.add
    )
    fitted = fit.result()
    facts = {"set": model_set.name, "precision": precision, **asdict(fitted)}
    is_shown = str(options.json_file) != "-"
    write_json(options.json_file, facts)
    if is_shown:
        _show(fitted)
    if not options.is_recorded:
        return
    manifest = with_temperatures(model_set.manifest, fitted.temperatures)
    _write(model_set, manifest, command_of(options))
    if is_shown:
        err.print(
            f"written into {escape(str(model_set.folder))}/manifest.yaml; the accuracy record"
        )
        err.print(f"is of before: tandem evaluate {escape(model_set.argument)} --images DIR")


def choose_sure(
    model_set: ModelSet,
    dataset: Dataset,
    precision: Precision,
    options: EvaluateOptions,
    track: Track[LabelledImage],
) -> None:
    """Choose when an answer is sure on half of the images, judge on the other half, write it.

    Raises:
        ModelSetError: too few images, no such share, or the set was changed meanwhile.

    """
    assert options.sure_at is not None
    fit = SureFit(precision, options.sure_at)
    evaluate_set(model_set, dataset, (precision,), track=track, observe=fit.add)
    sure = fit.result()
    facts = {"set": model_set.name, "precision": precision, **sure.model_dump(mode="json")}
    write_json(options.json_file, facts)
    if str(options.json_file) != "-":
        low, high = sure.right_interval
        out.print(
            f"sure from a probability of {sure.probability:.3f} on: {sure.share:.1%} of "
            f"{sure.num_images} images that it was not chosen by, "
            f"{sure.right:.1%} of them right (95 %: {low:.1%} to {high:.1%})"
        )
    if options.is_recorded:
        manifest = model_set.manifest.model_copy(update={"sure": sure})
        _write(model_set, manifest, command_of(options))


def _write(model_set: ModelSet, manifest: Manifest, made_by: str) -> None:
    folder: Path = model_set.folder
    with change(folder, made_by) as staging:
        now = read_manifest(folder)
        if now != model_set.manifest:
            raise ModelSetError(f"{folder} was changed meanwhile: nothing is written; fit again")
        staging.move_in(manifest)


def _show(fitted: Fitted) -> None:
    columns = ("ECE\nbefore", "after", "top-1\nbefore", "after", "nats\nbefore", "after")
    table = figures_table("", "temperature", *columns)
    for name, temperature in fitted.temperatures.items():
        before, after = fitted.before[name], fitted.after[name]
        table.add_row(
            name,
            f"{temperature:.3f}",
            *(f"{value:.4f}" for value in (before.calibration_error, after.calibration_error)),
            *(f"{value:.4f}" for value in (before.top1, after.top1)),
            *(f"{value:.3f}" for value in (before.log_likelihood, after.log_likelihood)),
        )
    out.print(table)
    out.print(
        f"fitted to {fitted.num_fitted} images, judged on {fitted.num_judged} others; ECE: "
        "calibration error; nats: mean log-likelihood"
    )


def check_plot_options(options: EvaluateOptions) -> None:
    """Refuse a plot of nothing, or one that cannot be drawn."""
    from calibration.evaluation.report_page import check_plot  # brings matplotlib

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
