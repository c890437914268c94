"""What serving adds to the networks: ``python tests/load/overhead.py PHOTOS``.

Servers that run side by side, at rest but for the one whose turn it is, and the same networks in
this process (the bound) are loaded in turns, in an order that rotates by round. ``together``:
the server written by hand (yardstick.py) and Tandem as shipped; ``null``: both with networks that
cost nothing and photos of 10 KB; ``apart``: Tandem with its members, and with all its stages, as
deployments of their own;
``serve-run``: plain ``serve run serve_config.yaml``. ``plans``, only if named: as ``together``, and
each request of ``fast`` asks the same Tandem for the set's fast plan. The load generator shares the
cores with all, and Ray takes some of them at rest: both are told, and ratios by the cores that they
left. Prints JSON.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from contestants import Other, all_running, members_apart, serve_run, tandems, yardstick
from larger_set import write_larger_set
from machine import describe, write_result
from null_set import small_photos, write_null_set
from overhead_report import FAST, TANDEM, judged, show, show_plans, summary
from overhead_turns import Turns

from app.bench.load import photos_in

APART = "configs/separate.yaml"
PLANS = "plans"
GROUPS = ("together", "null", "apart", "serve-run", PLANS)
LOADS = "1,16,64,forms"


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    only: Annotated[str, typer.Option(help="groups, with commas")] = ",".join(GROUPS[:-1]),
    clients: Annotated[str, typer.Option(help="loads: clients, or forms (of 16)")] = LOADS,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 8.0,
    starts: Annotated[int, typer.Option(help="of all services, each with its rounds", min=1)] = 1,
    model_set: Annotated[str, typer.Option("--set", help="name, folder, or a size: 224")] = "",
    config: Annotated[Path | None, typer.Option(help="of Tandem, together")] = None,
    also_tandem: Annotated[
        list[str], typer.Option(help="BIN:FOLDER, the tandem of another checkout")
    ] = [],  # noqa: B006
    alone: Annotated[str, typer.Option(help="measure these contestants only, no bound")] = "",
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure the groups, one after the other."""
    bodies, names = photos_in(photos), only.split(",")
    if unknown := set(names) - set(GROUPS):
        raise SystemExit(f"--only {','.join(sorted(unknown))}: there are {', '.join(GROUPS)}")
    others = [Other.parse(text) for text in also_tandem]
    result: dict[str, Any] = {"machine": describe(), "starts": starts}
    result |= {"rounds": rounds, "seconds": seconds}
    with TemporaryDirectory(prefix="to-", dir="/tmp") as folder:
        sets = Sets(Path(folder), model_set)
        for name in names:
            found = contestants(name, sets, config, others)
            chosen = [one for one in found if not alone or one.name in alone.split(",")]
            if not chosen:
                there = ", ".join(one.name for one in found)
                raise SystemExit(f"--alone {alone}: {name} has {there}")
            sent = small_photos(bodies) if name == "null" else bodies
            bound_set, rows = None if alone else sets.of(name), []
            for start in range(starts):  # a process can be 10 % slower all its life: its memory
                with all_running(chosen) as services:
                    if name == PLANS:
                        services[FAST] = services[TANDEM].asked("plan=fast")
                    turns = Turns(services, sent, bound_set, clients.split(","), seconds)
                    rows += turns.rounds(range(start * rounds, (start + 1) * rounds), name)
            result[name] = {"median": summary(rows), "turns": rows}
            show(name, result[name]["median"])
            if name == PLANS:
                result[name] |= judged(sets.of(name))
                show_plans(result)
            if out is not None:  # at once: a later group may fail
                out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    write_result(result, out)


class Sets:
    """The model sets that are measured, made when they are first asked for."""

    def __init__(self, folder: Path, chosen: str) -> None:
        self.folder, self._null = folder, folder / "null"
        self._chosen = chosen or "imagenette"
        if chosen.isdigit():
            self._chosen = str(write_larger_set(folder / chosen, int(chosen)))

    def of(self, group: str) -> str:
        if group != "null":
            return self._chosen
        if not self._null.exists():
            write_null_set(self._null)
        return str(self._null)


def contestants(group, sets, config, others):
    """Return who is compared in a group."""
    model_set = sets.of(group)
    own = str(config.absolute()) if config else None
    if group in ("together", PLANS):
        return [yardstick(model_set), *tandems("tandem", model_set, own, others)]
    if group == "null":
        return [yardstick(model_set, "--null"), *tandems("tandem", model_set, own, others)]
    together = tandems("tandem", model_set, own, ())
    if group == "apart":
        members = tandems("members", model_set, str(members_apart(sets.folder)), ())
        return [*together, *members, *tandems("apart", model_set, APART, others)]
    return [*together, serve_run(model_set, sets.folder)]


if __name__ == "__main__":
    typer.run(main)
