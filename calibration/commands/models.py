"""The commands ``tandem models list`` and ``verify``: what sets there are, and their files."""

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from calibration.commands.options import AsJson, ModelDirs, SetName, err
from models.errors import ModelSetError, TandemError
from models.extras import installed_version
from models.ledger import ensemble_figures
from models.manifest import Manifest, MemberRecord
from models.model_set import ModelSet, list_folders, load_model_set, search_path

console = Console(emoji=False)


def list_models(model_dir: ModelDirs = None, as_json: AsJson = False) -> None:
    """Show every model set that a name can stand for; exit code 1 if any cannot be read."""
    sets, problems = _readable(list_folders(search_path(model_dir or ())))
    if as_json:
        typer.echo(json.dumps([{"folder": str(s.folder), **_facts(s.manifest)} for s in sets]))
    else:
        _show(sets)
    for problem in problems:
        err.print(f"[red]left out:[/] {escape(problem)}")
    if problems:
        raise typer.Exit(1)


def _readable(folders: list[Path]) -> tuple[list[ModelSet], list[str]]:
    """Return the sets, and an error for each that cannot be read."""
    sets, problems = list[ModelSet](), list[str]()
    for folder in folders:
        try:
            sets.append(load_model_set(str(folder.resolve())))
        except ModelSetError as error:
            problems.append(error.message)
    return sets, problems


def _show(sets: list[ModelSet]) -> None:
    table = Table()
    for column in ("set", "classes", "input", "members", "top-1 of the\nensemble"):
        is_name = column in ("set", "members")
        table.add_column(column, no_wrap=not is_name, overflow="fold")
    for model_set in sets:
        facts = _facts(model_set.manifest)
        table.add_row(
            facts["name"],
            _classes(model_set.manifest),
            f"{', '.join(map(str, facts['input_sizes']))} px",
            ", ".join(_member_text(member) for member in model_set.manifest.members),
            _measured(facts),
        )
    console.print(table)
    for model_set in sets:  # below the table: a path is to be copied in one piece
        console.print(f"{model_set.name}: {escape(str(model_set.folder))}", soft_wrap=True)
    if not any(model_set.name == "imagenet" for model_set in sets):
        err.print(
            "ImageNet's 1,000 classes: tandem models fetch imagenet, in a checkout make imagenet"
        )


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "num_classes": manifest.num_classes,
        "input_size": manifest.image.input_size,
        "input_sizes": list(dict.fromkeys(r.input_size for r in manifest.inputs.rules)),
        "fixed_batch": {m.name: m.fixed_batch for m in manifest.members if m.fixed_batch},
        "members": [member.name for member in manifest.members],
        "runtimes": {m.name: list(m.runtimes) for m in manifest.members},
        "task": manifest.task,
        "threshold": manifest.threshold,
        "top1": ensemble_figures(manifest, "top-1"),
        "mean_average_precision": ensemble_figures(manifest, "mAP"),
        "runtime_versions": {
            runtime: installed_version(runtime)  # None: not installed
            for member in manifest.members
            for runtime in member.runtimes
        },
    }


def _classes(manifest: Manifest) -> str:
    """Return the number of classes; of a multi-label set, and its threshold."""
    if manifest.threshold is None:
        return str(manifest.num_classes)
    return f"{manifest.num_classes} labels\nfrom {manifest.threshold:g}"


def _member_text(member: MemberRecord) -> str:
    """Return a member's name, another runtime than OpenVINO, and a batch size that is built in."""
    facts = [str(runtime) for runtime in member.runtimes if runtime != "openvino"]
    if member.fixed_batch is not None:
        facts.append("one by one" if member.fixed_batch == 1 else str(member.fixed_batch))
    return f"{member.name} ({', '.join(facts)})" if facts else member.name


def _measured(facts: dict[str, Any]) -> str:
    """Return the ensemble's accuracy as the table has it: top-1, or a multi-label set's mAP."""
    top1 = [f"{p} {v:.4f}" for p, v in facts["top1"].items()]
    mean = [f"{p} {v:.4f} mAP" for p, v in facts["mean_average_precision"].items()]
    return "\n".join(top1 + mean) or "not measured"


def verify(name: SetName, model_dir: ModelDirs = None, as_json: AsJson = False) -> None:
    """Compare every file of a set with its manifest, and every network's golden answers."""
    model_set = load_model_set(name, search_path(model_dir or ()))
    problems = model_set.problems() or _problems_running(model_set)
    if as_json:
        typer.echo(json.dumps({"set": model_set.name, "ok": not problems, "problems": problems}))
    else:
        for problem in problems:
            console.print(f"[red]bad[/] {escape(problem)}", highlight=False, soft_wrap=True)
        if not problems:
            absent = model_set.absent_precisions
            num_files = sum(map(model_set.is_here, model_set.manifest.files))
            how = "answers as recorded" if model_set.golden else "runs; no golden answers recorded"
            console.print(f"[green]ok[/] {model_set.name}: {num_files} files, every network {how}")
            if absent:
                console.print(
                    f"{', '.join(absent)} is not here; only quantising, evaluating and serving it "
                    "need it: tandem models fetch imagenette-float brings the bundled set's",
                    highlight=False,
                    soft_wrap=True,
                )
    if problems:
        raise typer.Exit(1)


def _problems_running(model_set: ModelSet) -> list[str]:
    """Compile and run every network: right files may fit neither manifest nor machine."""
    from models import golden
    from models.runtimes.load import load
    from models.runtimes.options import RuntimeOptions

    manifest, problems = model_set.manifest, list[str]()
    options = RuntimeOptions(batch_sizes=(1,), float_type=manifest.float_type)
    for member in manifest.members:
        for precision in (p for p in member.networks if p not in model_set.absent_precisions):
            path = model_set.folder / member.networks[precision].files[0].path
            try:
                network = load(model_set.network_path(member.name, precision), options)
                size = manifest.image_of(member.name).input_size
                network.check_fits(size, manifest.num_classes)
                network.warm_up()
                if model_set.golden is not None:
                    golden.check(model_set.golden, member.name, precision, network)
            except (TandemError, RuntimeError) as error:
                problems.append(f"{path}: {error}")
    return problems
