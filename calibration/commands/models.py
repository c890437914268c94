"""``tandem models``: list and verify sets; a set's versions (history, pin, push).

What other commands of calibration share: consoles, options, parsers of their values.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from platformdirs import user_data_path
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from models.errors import ModelSetError, TandemError
from models.files import ResultFileError, check_can_write, needed_folder
from models.image import size_text
from models.ledger import current_records, ensemble_figures
from models.machine import installed_version
from models.manifest import Manifest, MemberRecord
from models.model_set import ModelSet, earlier_sets, list_folders, load_model_set, search_path
from models.own_functions import ALLOWED_VARIABLE
from models.stores import MAX_EARLIER, OBJECT_STORES, split_version

out = Console(soft_wrap=True, highlight=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
wrapped = Console(emoji=False)  # breaks lines at the width, and colours numbers

SetName = Annotated[str, typer.Argument(metavar="SET", help="name of a set, or its folder")]
ModelDirs = Annotated[
    list[Path] | None, typer.Option(help="searched before the user's and the bundled sets")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="print JSON, or write it to this file")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Into = Annotated[Path | None, typer.Option(help="folder of sets  (default: the user's own)")]
Replace = Annotated[bool, typer.Option(help="a set of that name, if there is one")]


def list_models(model_dir: ModelDirs = None, as_json: AsJson = False) -> None:
    """Show every model set that a name can stand for; exit code 1 if any cannot be read."""
    sets, problems = list[ModelSet](), list[str]()
    for folder in list_folders(search_path(model_dir or ())):
        try:
            sets.append(load_model_set(str(folder.resolve())))
        except ModelSetError as error:
            problems.append(error.message)
    if as_json:
        typer.echo(json.dumps([{"folder": str(s.folder), **set_as_json(s.manifest)} for s in sets]))
    else:
        _show_sets(sets)
    for problem in problems:
        err.print(f"[red]left out:[/] {escape(problem)}")
    if problems:
        raise typer.Exit(1)


def _show_sets(sets: list[ModelSet]) -> None:
    table = Table()
    for column in ("set", "classes", "input", "members", "top-1 of the\nensemble"):
        is_name = column in ("set", "members")
        table.add_column(column, no_wrap=not is_name, overflow="fold")
    for model_set in sets:
        manifest = model_set.manifest
        content = set_as_json(manifest)
        table.add_row(
            content["name"],
            f"{manifest.num_classes} labels\nfrom {manifest.threshold:g}"
            if manifest.is_multi_label
            else str(manifest.num_classes),
            f"{', '.join(map(size_text, content['input_sizes']))} px",
            ", ".join(_member_text(member) for member in manifest.members),
            _measured(content, manifest),
        )
    wrapped.print(table)
    for model_set in sets:  # below the table: a path is to be copied in one piece
        wrapped.print(f"{model_set.name}: {escape(str(model_set.folder))}", soft_wrap=True)
    if not any(model_set.name == "imagenet" for model_set in sets):
        err.print(
            "ImageNet's 1,000 classes: tandem models fetch imagenet, in a checkout make imagenet"
        )


def set_as_json(manifest: Manifest) -> dict[str, Any]:
    """Return a set's row of the list as JSON values."""
    return {
        "name": manifest.name,
        "num_classes": manifest.num_classes,
        "input_size": manifest.image.input_size,
        "input_sizes": list(dict.fromkeys(r.input_size for r in manifest.inputs.rules)),
        "fixed_batch": {m.name: m.fixed_batch for m in manifest.members if m.fixed_batch},
        "members": [member.name for member in manifest.members],
        "runtimes": {m.name: list(m.runtimes) for m in manifest.members},
        "task": manifest.task,
        "preprocess": manifest.preprocess,
        "threshold": manifest.threshold,
        "top1": ensemble_figures(manifest, "top-1"),
        "mean_average_precision": ensemble_figures(manifest, "mAP"),
        "runtime_versions": {
            runtime: installed_version(runtime)  # None: not installed
            for member in manifest.members
            for runtime in member.runtimes
        },
    }


def _member_text(member: MemberRecord) -> str:
    facts = [str(runtime) for runtime in member.runtimes if runtime != "openvino"]
    if member.fixed_batch is not None:
        facts.append("one by one" if member.fixed_batch == 1 else str(member.fixed_batch))
    return f"{member.name} ({', '.join(facts)})" if facts else member.name


def _measured(content: dict[str, Any], manifest: Manifest) -> str:
    """Return the ensemble's accuracy as the table has it: top-1, or a multi-label set's mAP.

    Without a record it is what the search of the fast plan measured.
    """
    top1 = [f"{p} {v:.4f}" for p, v in content["top1"].items()]
    mean = [f"{p} {v:.4f} mAP" for p, v in content["mean_average_precision"].items()]
    plan = next(filter(None, map(manifest.usable_plan, manifest.fingerprints)), None)
    of_plan = (
        [] if plan is None else [f"{plan.precision} {plan.judged.full_top1:.4f}", "by its plan"]
    )
    return "\n".join(top1 + mean or of_plan) or "not measured"


def verify(name: SetName, model_dir: ModelDirs = None, as_json: AsJson = False) -> None:
    """Compare every file of a set with its manifest, and every network's golden answers."""
    model_set = load_model_set(name, search_path(model_dir or ()))
    problems = model_set.problems() or problems_running(model_set)
    if as_json:
        typer.echo(json.dumps({"set": model_set.name, "ok": not problems, "problems": problems}))
    else:
        for problem in problems:
            wrapped.print(f"[red]bad[/] {escape(problem)}", highlight=False, soft_wrap=True)
        if not problems:
            absent = model_set.absent_precisions
            num_files = sum(map(model_set.is_here, model_set.manifest.files))
            how = "answers as recorded" if model_set.golden else "runs; no golden answers recorded"
            wrapped.print(f"[green]ok[/] {model_set.name}: {num_files} files, every network {how}")
            if absent:
                wrapped.print(
                    f"{', '.join(absent)} is not here; only quantising, evaluating and serving it "
                    "need it: tandem models fetch imagenette-float brings the bundled set's",
                    highlight=False,
                    soft_wrap=True,
                )
    if problems:
        raise typer.Exit(1)


def problems_running(model_set: ModelSet) -> list[str]:
    """Compile and run every network: right files may fit neither manifest nor machine."""
    from models import golden
    from models.network import RuntimeOptions, load

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


def history(name: SetName, model_dir: ModelDirs = None, as_json: AsJson = False) -> None:
    """List a set's versions: the current one, and earlier ones that are kept, newest first.

    A version is a fingerprint of all that answers depend on: networks, labels, image rule, weights.
    Commands that make another one keep that from before. serve, evaluate, verify ... take
    NAME@VERSION.
    """
    from calibration.sets.transaction import is_bundled

    base, _ = split_version(name)  # of any version the list is the same
    current = load_model_set(base, search_path(model_dir or ()))
    earlier = earlier_sets(current.folder)
    rows = [
        _version_as_json(listed, is_current=listed is current) for listed in (current, *earlier)
    ]
    bound = 0 if is_bundled(current.folder) else MAX_EARLIER
    if as_json:
        facts = {"set": current.name, "folder": str(current.folder), "max_earlier": bound}
        typer.echo(json.dumps(facts | {"versions": rows}, indent=2))
        return
    out.print(_versions_table(rows))
    if not bound:
        out.print("It comes with the program and is read-only: no versions of it are kept.")
    else:
        out.print(
            f"At most {bound} earlier versions are kept; tandem models pin "
            f"{escape(current.argument)}@VERSION makes one the current one again."
        )


def pin(
    name: Annotated[
        str,
        typer.Argument(
            metavar="SET@VERSION", help="name of a set, and a version that history lists"
        ),
    ],
    model_dir: ModelDirs = None,
) -> None:
    """Make an earlier version of a set the current one again; what was current is kept.

    Services that run keep serving what they loaded until they are restarted.
    """
    from calibration.sets.transaction import pin as pin_version

    base, version = split_version(name)
    if version is None:
        raise ModelSetError(
            f"{name!r} names no version: write {name.partition('@')[0]}@VERSION, with one of "
            f"tandem models history {name.partition('@')[0]}"
        )
    pinned = pin_version(load_model_set(base, search_path(model_dir or ())), version)
    out.print(f"[green]{escape(pinned.argument)}[/] is version {version}")


def labels(
    name: SetName,
    file: Annotated[
        Path | None,
        typer.Argument(help="the labels, in the networks' order, in any form that add takes"),
    ] = None,
    class_ids: Annotated[
        Path | None, typer.Option(help="the class ids, as datasets name their folders")
    ] = None,
    model_dir: ModelDirs = None,
) -> None:
    """Give a set other labels, class ids or both; its networks stay.

    The set from before is kept as a version.
    """
    from calibration.sets.labels import change_classes

    if file is None and class_ids is None:
        raise ModelSetError("give a FILE of labels, or --class-ids FILE, or both")
    before = load_model_set(name, search_path(model_dir or ()))
    made = change_classes(before, file, class_ids, lambda *said: out.print(escape(said[1])))
    ids = f", with ids from {made.class_ids[0]} on" if made.class_ids else ""
    out.print(
        f"[green]{escape(made.argument)}[/] has the labels {escape(made.labels[0])} to "
        f"{escape(made.labels[-1])}{escape(ids)}"
    )
    if current_records(before.manifest) and not current_records(made.manifest):
        out.print(
            "its accuracy was measured with the labels of before: tandem evaluate "
            f"{escape(made.argument)} --images DIR"
        )


def push(
    name: SetName,
    url: Annotated[str, typer.Argument(help=OBJECT_STORES)],
    model_dir: ModelDirs = None,
) -> None:
    """Copy a set to a store, from which tandem serve --model-set URL and others take it.

    Versions that were pushed there before stay, as URL@VERSION.
    """
    from models.stores import push as push_set

    model_set = load_model_set(name, search_path(model_dir or ()))
    if problems := model_set.problems():
        raise ModelSetError(problems[0])
    versions = list(model_set.fingerprints.values()) or [model_set.fingerprint()]
    push_set(model_set.folder, versions, url)
    out.print(f"[green]{escape(url)}[/] is {model_set.name} in version {versions[0]}")


def _version_as_json(model_set: ModelSet, *, is_current: bool) -> dict[str, Any]:
    manifest = model_set.manifest
    files = [model_set.folder / record.path for record in manifest.files]
    fingerprints = model_set.fingerprints
    return {
        "version": next(iter(fingerprints.values()), None),
        "fingerprints": fingerprints,
        "current": is_current,
        "made": manifest.made.model_dump(mode="json") if manifest.made else None,
        "accuracy": {
            figure: values
            for figure in ("top-1", "mAP")
            if (values := ensemble_figures(manifest, figure))
        },
        "size_mb": round(sum(path.stat().st_size for path in files if path.is_file()) / 1e6, 1),
    }


def _versions_table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("version", "made, by", "accuracy of\nthe ensemble", "MB"):
        table.add_column(column, no_wrap=column != "made, by", overflow="fold")
    for row in rows:
        versions = [f"{version} {precision}" for precision, version in row["fingerprints"].items()]
        made = row["made"] or {"at": "not noted", "by": ""}
        figures = [
            f"{figure} {value:.4f} {precision}"
            for figure, values in row["accuracy"].items()
            for precision, value in values.items()
        ]
        table.add_row(
            "\n".join([*versions, *(["[green]current[/]"] if row["current"] else [])]),
            f"{made['at'].replace('T', ' ').removesuffix('Z')}\n{escape(made['by'])}".strip(),
            "\n".join(figures) or "not measured",
            f"{row['size_mb']:.1f}",
        )
    return table


def pairs(texts: list[str], option: str) -> list[tuple[str, str]]:
    """Split NAME=VALUE options."""
    values = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ModelSetError(f"{option} {text!r}: write NAME=VALUE")
        values.append((key, value))
    return values


def triple(text: str, option: str) -> tuple[float, float, float]:
    """Read three finite numbers, one per channel."""
    parts = [number(part, option) for part in text.split(",")]
    if len(parts) == 1:
        parts *= 3
    if len(parts) != 3 or (option == "--scale" and 0 in parts):
        raise ModelSetError(f"{option} {text!r}: write one number, or three for three channels")
    return parts[0], parts[1], parts[2]


def number(text: str, option: str) -> float:
    """Read a finite number."""
    try:
        value = float(text)
    except ValueError:
        raise ModelSetError(f"{option}: {text!r} is not a number") from None
    if not abs(value) < 1e9:  # NaN and infinity too
        raise ModelSetError(f"{option}: {text} is no finite number")
    return value


def check_file(path: Path | None, option: str) -> None:
    """Raise :class:`ResultFileError` unless the option's file can be written; - is none."""
    if str(path) == "-":
        raise ResultFileError(f"{option} - is no file; name one")
    check_can_write(path)


def user_sets_dir() -> Path:
    """Return the folder where fetched and added sets go: ~/.local/share/tandem/models on Linux."""
    return needed_folder(user_data_path, "models")


def tell(made: ModelSet, *, is_inferred: bool = False) -> None:
    """Say what was made and what to do with it next; ``is_inferred``: nobody named the task."""
    out.print(f"[green]{escape(str(made.folder))}[/] is there")
    if (threshold := made.manifest.threshold) is not None:
        why = ", since every network ends in a sigmoid" if is_inferred else ""
        out.print(f"  multi_label{why}: labels with a score of {threshold:g} or more are answered")
    for record in made.manifest.members:
        on = [runtime for runtime in record.runtimes if runtime != "openvino"]
        where = f" on {', '.join(on)}" if on else ""
        size = size_text(made.manifest.image_of(record.name).input_size)
        batch = record.fixed_batch
        at_a_time = f", {batch} image{'s' * (batch > 1)} at a time" if batch else ""
        out.print(f"  {record.name}: {', '.join(record.networks)}{where}, {size} px{at_a_time}")
    folder = escape(made.argument)
    if (own := made.manifest.preprocess) is not None:
        out.print(f"it calls {own}: export {ALLOWED_VARIABLE}={own} allows that")
    if any("INT8" not in m.networks for m in made.manifest.members if "openvino" in m.runtimes):
        out.print(f"next: tandem quantize {folder} --images DIR, then")
    out.print(f"tandem evaluate {folder} --images DIR; tandem serve --model-set {folder}")
