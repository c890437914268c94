"""The commands ``tandem models history``, ``pin`` and ``push``: a set's versions."""

import json
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from calibration.commands.options import AsJson, ModelDirs, SetName, out
from models.errors import ModelSetError
from models.ledger import ensemble_figures
from models.model_set import ModelSet, earlier_sets, load_model_set, search_path
from models.store_files import OBJECT_STORES
from models.versions import MAX_EARLIER, split_version

Pinned = Annotated[
    str,
    typer.Argument(metavar="SET@VERSION", help="name of a set, and a version that history lists"),
]


def history(name: SetName, model_dir: ModelDirs = None, as_json: AsJson = False) -> None:
    """List a set's versions: the current one, and earlier ones that are kept, newest first.

    A version is a fingerprint of all that answers depend on: networks, labels, image rule, weights.
    Commands that make another one keep that from before. serve, evaluate, verify ... take
    NAME@VERSION.
    """
    from calibration.sets.history import is_bundled

    base, _ = split_version(name)  # of any version the list is the same
    current = load_model_set(base, search_path(model_dir or ()))
    earlier = earlier_sets(current.folder)
    rows = [_facts(listed, is_current=listed is current) for listed in (current, *earlier)]
    bound = 0 if is_bundled(current.folder) else MAX_EARLIER
    if as_json:
        facts = {"set": current.name, "folder": str(current.folder), "max_earlier": bound}
        typer.echo(json.dumps(facts | {"versions": rows}, indent=2))
        return
    out.print(_table(rows))
    if not bound:
        out.print("It comes with the program and is read-only: no versions of it are kept.")
    else:
        out.print(
            f"At most {bound} earlier versions are kept; tandem models pin "
            f"{escape(current.argument)}@VERSION makes one the current one again."
        )


def pin(name: Pinned, model_dir: ModelDirs = None) -> None:
    """Make an earlier version of a set the current one again; what was current is kept.

    Services that run keep serving what they loaded until they are restarted.
    """
    from calibration.sets.pinned import pin as pin_version

    base, version = split_version(name)
    if version is None:
        raise ModelSetError(
            f"{name!r} names no version: write {name.partition('@')[0]}@VERSION, with one of "
            f"tandem models history {name.partition('@')[0]}"
        )
    pinned = pin_version(load_model_set(base, search_path(model_dir or ())), version)
    out.print(f"[green]{escape(pinned.argument)}[/] is version {version}")


def push(
    name: SetName,
    url: Annotated[str, typer.Argument(help=OBJECT_STORES)],
    model_dir: ModelDirs = None,
) -> None:
    """Copy a set to a store, from which tandem serve --model-set URL and others take it.

    Versions that were pushed there before stay, as URL@VERSION.
    """
    from calibration.sets.push import push as push_set

    model_set = load_model_set(name, search_path(model_dir or ()))
    if problems := model_set.problems():
        raise ModelSetError(problems[0])
    versions = list(model_set.fingerprints.values()) or [model_set.fingerprint()]
    push_set(model_set.folder, versions, url)
    out.print(f"[green]{escape(url)}[/] is {model_set.name} in version {versions[0]}")


def _facts(model_set: ModelSet, *, is_current: bool) -> dict[str, Any]:
    manifest = model_set.manifest
    files = [model_set.folder / record.path for record in manifest.files]
    fingerprints = model_set.fingerprints
    return {
        "version": next(iter(fingerprints.values()), None),
        "fingerprints": fingerprints,
        "current": is_current,
        "made": manifest.made.model_dump(mode="json") if manifest.made else None,
        "accuracy": {
            figure: ensemble_figures(manifest, figure)
            for figure in ("top-1", "mAP")
            if ensemble_figures(manifest, figure)
        },
        "size_mb": round(sum(path.stat().st_size for path in files if path.is_file()) / 1e6, 1),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("version", "made", "by", "accuracy of\nthe ensemble", "MB"):
        table.add_column(column, no_wrap=column != "by", overflow="fold")
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
            made["at"].replace("T", " ").removesuffix("Z"),
            escape(made["by"]),
            "\n".join(figures) or "not measured",
            f"{row['size_mb']:.1f}",
        )
    return table
