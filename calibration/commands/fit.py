"""``tandem evaluate --calibrate``, ``--sure-at``, ``--plan``: what they fit goes into the manifest.

``--foreign`` measures how many answers to images of other classes are sure.
"""

from dataclasses import asdict, replace

from rich.markup import escape

from calibration.commands.evaluate import EvaluateOptions, Tracker, progress_bar, sampled
from calibration.commands.models import err, out
from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import (
    Evaluation,
    evaluate_set,
    foreign_rows,
    read_foreign,
    sure_of_foreign,
)
from calibration.evaluation.fitting import (
    Fitted,
    Rows,
    fit_temperatures,
    fit_trust,
    with_temperatures,
)
from calibration.evaluation.plans import search
from calibration.evaluation.report import (
    check_can_keep,
    figures_table,
    plans_json,
    show_plans,
    verdict,
)
from calibration.sets.transaction import change
from models.ensemble import ForeignRecord, SubsetRecord
from models.errors import ModelSetError
from models.files import write_json
from models.manifest import ENSEMBLE, Manifest, read_manifest
from models.model_set import ModelSet
from models.record import Precision


def fit(model_set: ModelSet, options: EvaluateOptions) -> None:
    """Fit what the options ask for, show it, and write it into the manifest."""
    _check_fitting(options, model_set)
    if options.max_images and options.record:
        options = replace(options, record=False)
        err.print("--max-images: a sample's result is shown, and not written into the manifest")
    if options.record:
        check_can_keep(model_set.folder, f"tandem evaluate {options.fitting}")
    dataset = read_dataset(options.labelled, model_set, options.ids_of(model_set))
    dataset = sampled(dataset, options.max_images)
    manifest = model_set.manifest
    if options.calibrate:  # rows without any temperature
        manifest = with_temperatures(manifest, dict.fromkeys([*manifest.weights, ENSEMBLE], 1.0))
    plain, precision = ModelSet(model_set.folder, manifest), _whole_precision(model_set)
    weight = options.wrong_weight or 1.0
    if options.plan and manifest.sure is not None:
        weight = manifest.sure.wrong_weight
    foreign = _foreign_rows(plain, options, precision)
    rows = Rows(manifest, precision, dataset.name, weight, foreign)
    with progress_bar() as progress:
        track = Tracker(progress, f"{model_set.name} {rows.precision}")
        measured = evaluate_set(plain, dataset, (rows.precision,), track=track, observe=rows.add)
    if options.plan:
        _fit_plan(model_set, rows, measured, options)
    elif options.sure_at is not None:
        _choose_sure(model_set, rows, options)
    else:
        _fit_temperatures(model_set, rows, options)


def _check_fitting(options: EvaluateOptions, model_set: ModelSet) -> None:
    option = options.fitting
    what = {
        "--calibrate": "fits temperatures",
        "--sure-at": "chooses when an answer is sure",
        "--plan": "searches a fast plan",
    }[option]
    if model_set.manifest.task == "multi_label":
        raise ModelSetError(
            f"{option}: {model_set.name} is multi-label, and it {what} of classes that exclude "
            "each other; leave it out"
        )
    others = {
        "--url": options.url is not None,
        "--html": options.html is not None,
        "--sure-at": options.calibrate and options.sure_at is not None,
        "--plan": options.plan and option != "--plan",
        "--foreign": options.foreign is not None and options.calibrate,
        "--wrong-weight": options.wrong_weight is not None and option == "--plan",
    }
    if named := [name for name, is_asked in others.items() if is_asked]:
        raise ModelSetError(
            f"{' and '.join(named)}: {option} {what} and evaluates nothing else; "
            "evaluate again afterwards"
        )
    sure = model_set.manifest.sure
    if option == "--plan" and sure is not None and sure.foreign and options.foreign is None:
        raise ModelSetError(
            f"--plan: images of other classes ({sure.foreign.dataset}) chose when {model_set.name} "
            "is sure; give them again with --foreign DIR"
        )


def _fit_temperatures(model_set: ModelSet, rows: Rows, options: EvaluateOptions) -> None:
    fitted = fit_temperatures(rows)
    facts = {"set": model_set.name, "precision": rows.precision, **asdict(fitted)}
    write_json(options.json_file, facts)
    if options.has_tables:
        _show_fitted(fitted)
    if not options.record:
        return
    manifest = with_temperatures(model_set.manifest, fitted.temperatures)
    _write(model_set, manifest, options.fitting)
    if options.has_tables:
        again = f"tandem evaluate {escape(model_set.argument)} --images DIR"
        err.print(
            f"written into {escape(str(model_set.folder))}/manifest.yaml; the accuracy record\n"
            f"is of before, bounds and plan are gone: {again} --sure-at 0.95, --plan, and\n"
            "without either"
        )


def _choose_sure(model_set: ModelSet, rows: Rows, options: EvaluateOptions) -> None:
    assert options.sure_at is not None
    manifest = fit_trust(model_set.manifest, rows, options.sure_at)
    sure, answer_set = manifest.sure, manifest.answer_set
    assert sure is not None
    assert answer_set is not None
    facts = {"set": model_set.name, "precision": rows.precision, **sure.model_dump(mode="json")}
    facts["answer_set"] = answer_set.model_dump(mode="json")
    facts["trust"] = [record.model_dump(mode="json") for record in manifest.trust]
    write_json(options.json_file, facts)
    if options.has_tables:
        _show_sure("", manifest)
        for record in manifest.trust:
            _show_sure(f"{' + '.join(record.members)} alone: ", record)
        out.print(
            f"answer sets hold the right class of {answer_set.coverage:.1%} of them, with "
            f"{answer_set.mean_size:.2f} classes in the mean"
        )
    if options.record:
        _write(model_set, manifest, options.fitting)


def _show_sure(who: str, record: Manifest | SubsetRecord) -> None:
    if (sure := record.sure) is None:
        out.print(f"{who}no bound")
        return
    low, high = sure.right_interval
    out.print(
        f"{who}sure from a probability of {sure.probability:.3f} on: {sure.share:.1%} of "
        f"{sure.num_images} images that it was not chosen by, "
        f"{sure.right or 0:.1%} of them right (95 %: {low:.1%} to {high:.1%})"
    )
    if sure.foreign is not None:
        out.print(f"  of images of other classes: {_foreign_text(sure.foreign)}")


def _foreign_text(record: ForeignRecord) -> str:
    low, high = (100 * bound for bound in record.interval)
    return f"{record.share:.1%} of {record.num_images} (95 %: {low:.1f} to {high:.1f})"


def _fit_plan(
    model_set: ModelSet, rows: Rows, measured: Evaluation, options: EvaluateOptions
) -> None:
    manifest = model_set.manifest
    costs = {name: of[rows.precision] for name, of in measured.cpu_ms_per_image.items()}
    facts = (costs, measured.dataset.name, measured.images_sha256)
    result = search(manifest, rows, rows.precision, *facts)
    write_json(options.json_file, {"set": model_set.name, **plans_json(result)})
    if options.has_tables:
        show_plans(out, result)
    if options.plot is not None:
        from calibration.evaluation.report_page import write_plot

        write_plot(options.plot, result)
        err.print(f"the plot: {escape(str(options.plot))}")
    if result.outcome == "refused":
        raise ModelSetError(f"--plan: {verdict(result)}: nothing is written; give more images")
    if options.record:
        manifest = manifest.model_copy(update={"fast_plan": result.record})
        _write(model_set, manifest, options.fitting)
        err.print(f"serve it with: tandem serve --model-set {model_set.argument} --plan fast")


def _write(model_set: ModelSet, manifest: Manifest, option: str) -> None:
    folder = model_set.folder
    with change(folder, f"tandem evaluate {option}") as staging:
        if read_manifest(folder) != model_set.manifest:
            raise ModelSetError(f"{folder} was changed meanwhile: nothing is written; fit again")
        staging.move_in(manifest)


def _show_fitted(fitted: Fitted) -> None:
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


def measure_foreign(model_set: ModelSet, options: EvaluateOptions) -> None:
    """Show how many answers to images of other classes are sure."""
    if options.images is not None or options.url is not None or options.html is not None:
        raise ModelSetError(
            "--foreign alone measures how often the set is sure; with --images give --sure-at 0.95 "
            "or --plan too, which choose bounds by both; --url and --html do not go with it"
        )
    rows = _foreign_rows(model_set, options, _whole_precision(model_set))
    assert rows is not None
    measured = sure_of_foreign(model_set, rows)
    records = {name: record.model_dump(mode="json") for name, record in measured.items()}
    facts = {"set": model_set.name, "precision": rows.precision, "foreign": records}
    write_json(options.json_file, facts)
    if options.has_tables:
        out.print(f"sure, of images in {escape(rows.dataset)} (the half that chooses no bound):")
        for name, record in measured.items():
            out.print(f"{name}: {_foreign_text(record)}")


def _foreign_rows(
    model_set: ModelSet, options: EvaluateOptions, precision: Precision
) -> Rows | None:
    if options.foreign is None:
        return None
    if model_set.manifest.is_multi_label:
        raise ModelSetError(
            f"--foreign: {model_set.name} is multi-label, and sure answers are of classes that "
            "exclude each other; leave it out"
        )
    images, note = read_foreign(options.foreign, model_set)
    if note:
        err.print(escape(note))
    with progress_bar() as progress:
        track = Tracker(progress, f"{model_set.name} {precision}, other classes")
        return foreign_rows(model_set, precision, images, options.foreign, track)


def _whole_precision(model_set: ModelSet) -> Precision:
    """Return the precision that all members have, INT8 rather than a float one."""
    if not (whole := [*model_set.manifest.fingerprints]):
        raise ModelSetError(
            "--calibrate, --sure-at, --plan and --foreign take networks of one precision, and none "
            f"of {model_set.name} has all members; tandem quantize makes the missing ones"
        )
    return whole[0]
