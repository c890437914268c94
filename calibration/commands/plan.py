"""``tandem plan``: prints the nodes and replicas for an arrival rate and a p99."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from calibration.commands.models import JsonFile, out
from calibration.planning import (
    FORMS,
    HTTP_MS,
    SERIAL_BUSY,
    SERIAL_CPU_MS,
    SIMULATED_RATE,
    UTILIZATIONS,
    Costs,
    Form,
    Plan,
    PlanError,
    PlannedForm,
    Requirements,
    compare_forms,
    planned_costs,
    read_costs,
)
from calibration.planning import plan as make_plan
from models.ensemble import PlanName
from models.files import check_can_write, write_json
from models.model_set import load_model_set


def plan(
    rate: Annotated[float, typer.Option(help="images/s that arrive")] = 800.0,
    p99_ms: Annotated[float, typer.Option(help="p99 to keep, at the HTTP client")] = 100.0,
    node_cores: Annotated[
        int, typer.Option(help="physical cores of a node, SMT threads not counted")
    ] = 32,
    survive_nodes: Annotated[int, typer.Option(help="nodes that may die at a time")] = 1,
    model_set: Annotated[str, typer.Option(help="name of a set, or its folder")] = "imagenette",
    costs: Annotated[
        Path | None,
        typer.Option("--costs", help="of tandem bench --json, on a machine like your nodes"),
    ] = None,
    apart: Annotated[
        bool,
        typer.Option("--apart", help="stages as deployments of their own (configs/cluster.yaml)"),
    ] = False,
    answers: Annotated[
        PlanName,
        typer.Option("--plan", help="fast: by the set's fast plan, with the share that goes on"),
    ] = "full",
    json_file: JsonFile = None,
) -> None:
    """Say how many nodes and replicas a load takes, from what an image costs.

    Every assumption is listed. Costs are the set's record unless --costs gives
    what tandem bench measured on a machine like your nodes. From the record the
    forms of the graph are compared: whole, members apart, all stages apart.
    """
    check_can_write(json_file)
    needs = Requirements(rate, p99_ms, node_cores, survive_nodes)
    manifest = load_model_set(model_set).manifest
    members = tuple(member.name for member in manifest.members)
    if costs is not None and answers == "fast":
        raise PlanError("--plan and --costs: how requests were answered is in the file already")
    if costs is not None and apart:
        raise PlanError("--apart and --costs: where the stages ran is in the file already")
    form: Form = "stages" if apart else "whole"
    known = read_costs(costs, members) if costs else planned_costs(manifest, "INT8", form, answers)
    best = make_plan(needs, known)
    forms = [] if costs else compare_forms(needs, manifest, answers)
    assumed = assumptions(needs, best.costs)
    if str(json_file) != "-":
        _show(needs, known, best)
        if forms:
            _show_forms(forms)
        out.print("assumed:")
        for line in assumed:
            out.print(f"  - {line}", markup=False)
    write_json(json_file, as_json(needs, known, best, forms) | {"assumed": assumed})


def _show(needs: Requirements, costs: Costs, best: Plan) -> None:
    dead = needs.survive_nodes
    out.print(
        f"[bold]{best.nodes} nodes[/] of {needs.node_cores} cores for {needs.rate:g} requests/s, "
        f"{needs.rate * len(costs.members):g} predictions/s; p99 {best.p99_ms:.0f} ms"
        + (f" with {dead} of them dead" if dead else "")
    )
    table = Table()
    table.add_column("stage", overflow="fold")  # a long name takes lines, not the figures' room
    for column in ("CPU-ms", "cores", "a node", "in all", "busy", f"{dead} dead"):
        table.add_column(column, no_wrap=True, justify="right")
    for name, ms in costs.cpu_ms.items():
        table.add_row(
            name,
            f"{ms:.1f}",
            f"{best.costs.cores(name):g}",
            str(best.replicas_per_node[name]),
            str(best.replicas_per_node[name] * best.nodes),
            f"{best.utilization[name]:.0%}",
            f"{best.utilization_survived[name]:.0%}",
        )
    out.print(table)
    out.print(
        "cores of a replica; replicas a node and in all; how busy, and how busy with nodes dead"
    )


def _show_forms(forms: Sequence[PlannedForm]) -> None:
    table = Table(title="the same load, by where the stages run", title_justify="left")
    table.add_column("form")
    for column in ("CPU-ms", "alone, ms", "nodes", "replicas", "p99, ms"):
        table.add_column(column, no_wrap=True, justify="right")
    for form in forms:
        counted = ("-", "-", "-")
        if form.plan is not None:
            replicas = sum(form.plan.replicas_per_node.values()) * form.plan.nodes
            counted = (str(form.plan.nodes), str(replicas), f"{form.plan.p99_ms:.0f}")
        table.add_row(FORMS[form.form], f"{form.cpu_ms:.1f}", f"{form.alone_ms:.0f}", *counted)
    out.print(table)
    for form in forms:
        if form.plan is None:
            out.print(f"{FORMS[form.form]}: {form.why_not}", markup=False)


def assumptions(needs: Requirements, costs: Costs) -> list[str]:
    """Return what the plan takes for granted."""
    where = "all stages in the Gateway's process" if costs.is_together else "stages apart"
    spread = (
        "every node has the same replicas: in configs/cluster.yaml a stage's "
        'max_replicas_per_node is "a node" and its max_replicas "in all" or more; keep '
        'min_replicas above "a node", so that no node\'s death takes all of a stage'
    )
    serial = (
        f"{SERIAL_CPU_MS:g} ms of an image pass through one process's event loop and Python's "
        f"lock, whatever its cores: {1e3 / SERIAL_CPU_MS:.0f} images/s at most, {SERIAL_BUSY:.0%} "
        f"of it planned; Gateways of {costs.cores('Gateway'):g} cores fill a node of "
        f"{needs.node_cores} best"
    )
    return [
        f"costs: {costs.source}. Yours will differ: on a machine like your nodes, tandem bench "
        "--concurrency 16 --json costs.json, then --costs costs.json",
        f"{where}; an image's time is its CPU time, one core each: {costs.alone_ms:.0f} ms alone, "
        f"{HTTP_MS:g} ms of it HTTP and Ray"
        + (", the members side by side" if costs.member_ms else ""),
        "a core of the node does what a core did there, with all of them busy: memory bandwidth, "
        "clock and SMT are not in it",
        f"{costs.around_ms:.1f} CPU-ms an image for Ray and HAProxy, at least one core a node",
        f"images of one request each, Poisson arrivals of {needs.rate:g} a second, evenly over "
        f"replicas; no stage over {UTILIZATIONS[0]:.0%} busy (nodes dead: {needs.survive_nodes})",
        "p99 from a simulation of the queues"
        + (
            f" of as many nodes as take {SIMULATED_RATE:g} images/s"
            if needs.rate > SIMULATED_RATE
            else ""
        )
        + "; the network is not in it"
        + (", and members of one process run one after the other" if costs.is_together else ""),
        *([serial] if costs.is_together else [spread]),
    ]


def as_json(
    needs: Requirements, costs: Costs, best: Plan, forms: Sequence[PlannedForm] = ()
) -> dict[str, Any]:
    """Return plain values."""
    return {
        **vars(needs),
        "predictions_per_s": needs.rate * len(costs.members),
        "nodes": best.nodes,
        "simulated_p99_ms": round(best.p99_ms, 1),
        "stages": {
            name: {
                "cpu_ms": round(ms, 2),
                "cores": best.costs.cores(name),
                "replicas_per_node": best.replicas_per_node[name],
                "replicas": best.replicas_per_node[name] * best.nodes,
                "utilization": round(best.utilization[name], 3),
                "utilization_survived": round(best.utilization_survived[name], 3),
            }
            for name, ms in costs.cpu_ms.items()
        },
        "forms": {
            form.form: {
                "cpu_ms": round(form.cpu_ms, 2),
                "alone_ms": round(form.alone_ms, 1),
                "nodes": form.plan.nodes if form.plan else None,
                "simulated_p99_ms": round(form.plan.p99_ms, 1) if form.plan else None,
                "why_not": form.why_not,
            }
            for form in forms
        },
    }
