"""Writes docs/performance.md and docs/faults.md from the results that are committed.

``python -m tests.support.result_pages`` from the project's root. Every table names the file that
its figures come from; the file has the command that measured them.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.wrapped import wrapped

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "load" / "results"
PLACE = "../tests/load/results"
MADE_BY = "<!-- Written by: python -m tests.support.result_pages -->"
CONTESTANTS = {
    "bound": "the networks alone, no server",
    "yardstick": "FastAPI server written by hand",
    "tandem": "**Tandem**, traced",
}
SHARES = (  # what runs, the result's file, its group
    ("128 px, AVX512-VNNI", "one-way", "together"),
    ("128 px, AVX2", "one-way-avx2", "together"),
    ("224 px, AVX512-VNNI", "overhead-224-vnni", "together"),
    ("80 px, AVX512-VNNI", "overhead-80-vnni", "together"),
    ("networks that cost nothing, AVX512-VNNI", "overhead-vnni", "null"),
    ("128 px, AMX", "overhead", "together"),
    ("224 px, AMX", "overhead-224", "together"),
)
FORMS = {  # of the graph, each with the file that has it
    "tandem": ("whole, in one process", "`cluster-whole.yaml`"),
    "members": ("members apart", ""),
    "apart": ("all stages apart", "`cluster.yaml`"),
}
CROWDS = {
    "stalled_calls": "600 gRPC calls that stall",
    "crowd_on_one_member": "40 clients that ask one member",
}
ATTACKS = {
    "unread": "140 slow connections to routes that read no body",
    "begun": "140 slow connections to `/v1/classify`",
    "header": "calls with a false internal header over gRPC",
}

FAULTS_HEAD = ("fault", "load, 1/s", "accepted", "lost", "wrong", "recovered after, s")


def result_of(name: str) -> dict[str, Any]:
    """Return a committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def link(name: str) -> str:
    return f"[{name}.json]({PLACE}/{name}.json)"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def machine(result: dict[str, Any]) -> str:
    """Say where a result was measured, and of which commit."""
    told = result.get("machine", result)
    return f"{told['cores']} cores of an {told['cpu']}, commit {told['commit'][:7]}"


def contest() -> list[str]:
    """Return the table that README has as well."""
    of_load = result_of("one-way")["together"]["median"]
    rows = [
        [
            label,
            f"{of_load['16'][name]['images_per_s']:.0f}",
            f"{of_load['16'][name]['cpu_ms']:.1f}",
            f"{of_load['1'][name]['p50_ms']:.1f}",
        ]
        for name, label in CONTESTANTS.items()
    ]
    return table(["", "images/s, 16 clients", "CPU ms an image", "one client, p50 ms"], rows)


def performance() -> str:
    """Return the page of speed."""
    main = result_of("one-way")
    run = result_of("serve-run")["serve-run"]["median"]["16"]["serve-run"]["of_tandem"]
    lines = [
        "# Performance",
        "",
        MADE_BY,
        "",
        "Serving adds work to the networks. These tables measure how much.",
        "The reference is a server that was written by hand for this one purpose",
        "([yardstick.py](../tests/load/yardstick.py)). It runs the same networks in batches",
        "in one process with FastAPI and uvicorn. It has no limits, deadlines, traces or metrics.",
        "",
        "All contestants run in turns on the same machine. Compare shares, not absolute times:",
        "machines differ.",
        "",
        "## Against a server written by hand",
        "",
        f"The bundled set at 128 px; medians of {main['rounds']} rounds; {machine(main)};",
        f"{link('one-way')}.",
        "",
        *contest(),
        "",
        f"`serve run serve_config.yaml` reaches {run:.2f} of `tandem serve`",
        f"({link('serve-run')}): it has Serve's own proxy and defaults.",
        "",
        "## Other sizes and CPUs",
        "",
        "Images/s as a share of that server's. Rows of other commits are older; the 80 px networks",
        "cost about as little as 128 px does with AMX.",
        "",
        *table(
            ["networks and CPU", "1 client", "16 clients", "64 clients", "commit", "result"],
            (_shares(*row) for row in SHARES),
        ),
        "",
        "## Start and rest",
        "",
        "Seconds from `tandem serve` to the first answer, and what the service takes at rest.",
        "The first start compiles the networks.",
        "",
        *table(
            ["machine", "ready, s", "first start, s", "memory, GB", "cores at rest", "result"],
            (_start(name) for name in ("startup-vnni", "startup")),
        ),
        "",
        "## Whole graphs, or stages apart",
        "",
        "The bundled set, with the same cores for every form of the graph.",
        "",
        *table(
            [
                "the graph",
                "file",
                "images/s, 16 clients",
                "CPU ms an image",
                "one client, p50 ms",
                "result",
            ],
            (row for name in ("apart", "apart-vnni") for row in _forms(name)),
        ),
        "",
        "## The response cache",
        "",
        "16 clients send photos; the service has seen a share of them before.",
        f"{machine(result_of('cache'))}; {link('cache')}.",
        "",
        *table(["seen before", "images/s, `cache: none`", "images/s, `cache: local`"], _cached()),
        "",
        "## Overload",
        "",
        "Requests arrive at three and ten times the rate that the service carries. Goodput is the",
        "share of that rate that is still answered in time, of the cores that the load generator",
        "leaves. p99 is compared with p99 at 0.8 times the rate.",
        "",
        *table(
            ["load", "goodput", "p99, times", "CPU ms a refusal", "result"],
            (row for name in ("overload-vnni", "overload") for row in _overload(name)),
        ),
        "",
        "`python tests/load/overload.py PHOTOS` measures it.",
    ]
    return wrapped("\n".join(lines) + "\n")


def _shares(label: str, name: str, group: str) -> list[str]:
    result = result_of(name)
    part = result[group]
    shares = [
        f"{part['median'][load]['tandem']['of_yardstick']:.2f}" if load in part["median"] else ""
        for load in ("1", "16", "64")
    ]
    commit = part.get("machine", result["machine"])["commit"][:7]
    return [label, *shares, commit, link(name)]


def _start(name: str) -> list[str]:
    result = result_of(name)
    idle = result["idle"]
    return [
        f"{result['cores']} cores, {result['cpu']}",
        f"{result['ready_after_s']['median']:.0f}",
        f"{result['first_start_s']:.0f}",
        f"{idle['pss_mb'] / 1e3:.2f}",
        f"{idle['cores']:.2f}",
        link(name),
    ]


def _forms(name: str) -> Iterable[list[str]]:
    result = result_of(name)
    cpu = result["machine"]["cpu"].split(" (")[0]
    for form, (label, file) in FORMS.items():
        many, one = (result["apart"]["median"][clients][form] for clients in ("16", "1"))
        yield [
            f"{label}, {cpu}",
            file,
            f"{many['images_per_s']:.0f}",
            f"{many['cpu_ms']:.1f}",
            f"{one['p50_ms']:.1f}",
            link(name),
        ]


def _cached() -> Iterable[list[str]]:
    median = result_of("cache")["median"]
    for share in ("0", "0.5", "0.9", "0.99"):
        rates = [f"{median[f'{where} {share}']['images_per_s']:.0f}" for where in ("none", "local")]
        yield [f"{float(share):.0%}", *rates]


def _overload(name: str) -> Iterable[list[str]]:
    result = result_of(name)
    for times, share in result["median_goodput_share"].items():
        median = result["medians"][times]
        yield [
            f"{times}, {result['machine']['cpu'].split(' (')[0]}",
            f"{share['of_what_the_generator_left']:.2f}",
            f"{median['p99_times_usual']:.1f}",
            f"{median['cpu_ms_a_refusal']:.2f}",
            link(name),
        ]


def faults() -> str:
    """Return the page of faults and of hostile load."""
    result, of_head = result_of("faults"), result_of("faults-head")
    of_whole_graphs = result_of("faults-whole")
    head = of_head["faults"]["head"]
    placed = sum(sum(by_node.values()) for by_node in head["placement"].values())
    lines = [
        "# Faults and hostile load",
        "",
        MADE_BY,
        "",
        "## Faults of a cluster",
        "",
        "Three Ray nodes, small networks, `kill -9` and cut links, under load.",
        "A request is lost if it was accepted and got no right answer.",
        f"`python tests/load/faults.py --fault NAME`; {machine(result)}; {link('faults')}.",
        f"`head` is of {machine(of_head)}; {link('faults-head')}.",
        "Ray keeps its state in Redis, and a supervisor starts the head again until it stays;",
        f"{head['replicas_kept']} of {placed} replicas go on meanwhile.",
        "",
        *table(FAULTS_HEAD, _faults({**result["faults"], **of_head["faults"]})),
        "",
        "A request on its way through the HAProxy that dies is lost. Put a balancer that retries",
        "in front of several nodes. A new model set is rolled out without a failed request, if "
        "its stages start within `request_timeout_s` of each other.",
        "",
        "The same with whole graphs (`--config configs/cluster-whole.yaml`);",
        f"{machine(of_whole_graphs)}; {link('faults-whole')}. Links were not cut.",
        "",
        *table(FAULTS_HEAD, _faults(of_whole_graphs["faults"])),
        "",
        "## Good requests during an attack",
        "",
        "A client sends good requests at a steady rate while others attack.",
        "",
        *table(["attack", "good requests", "answered", "p99 ms", "result"], _attacks()),
    ]
    return wrapped("\n".join(lines) + "\n")


def _faults(measured: dict[str, dict[str, Any]]) -> Iterable[list[str]]:
    for name, fault in measured.items():
        yield [
            f"`{name}`: {fault['fault']}",
            f"{fault['offered_per_s']:.0f}",
            f"{fault['accepted']}",
            f"{fault['lost']}",
            f"{fault['wrong']}",
            f"{fault['recovered_after_s']:.0f}",
        ]


def _attacks() -> Iterable[list[str]]:
    hostile = result_of("hostile")
    sent = f"{hostile['hostile']['sent']:,} malformed requests"
    yield [sent, *_good(hostile["good_beside_hostile"]), link("hostile")]
    crowding = result_of("crowding")["beside_large_pictures"]["good"]
    yield ["8 clients that send large PNGs", *_good(crowding), link("crowding")]
    shares = result_of("hostile_shares")
    for name, label in ATTACKS.items():
        yield [label, *_good(shares[name]), link("hostile_shares")]
    crowds = result_of("hostile_crowds")["crowds"]
    for name, label in CROWDS.items():
        yield [label, *_good(crowds[name]["http"]), link("hostile_crowds")]


def _good(row: dict[str, Any]) -> list[str]:
    return [f"{row['sent']:,}", f"{row['right']:,}", f"{row['p99_ms']:.0f}"]


PAGES = {"performance.md": performance, "faults.md": faults}


def main() -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
