"""The tables of docs/performance.md and docs/faults.md have the figures of their results."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONTESTANTS = ("bound", "yardstick", "tandem")
SHARES = {  # the group of each result
    **dict.fromkeys(("one-way", "house-vnni", "watched-vnni", "one-way-avx2"), "together"),
    **dict.fromkeys(("overhead-224-vnni", "overhead-80-vnni"), "together"),
    "overhead-vnni": "null",
    **dict.fromkeys(("overhead", "overhead-224"), "together"),
}


def result(name):
    return json.loads((ROOT / f"tests/load/results/{name}.json").read_text("utf-8"))


def row(*cells: str, of: str = "") -> str:
    """Return the end of a table's line; ``of`` is the result that it links."""
    link = [f"[{of}.json](../tests/load/results/{of}.json)"] if of else []
    return f"| {' | '.join([*cells, *link])} |"


def measured(name: str) -> str:
    """Say of which machine and commit a result is."""
    content = result(name)
    machine = content.get("machine", content)
    where = f"{machine['cores']} cores of an {machine['cpu']}, commit {machine['commit'][:7]}"
    return f"{where}; [{name}.json](../tests/load/results/{name}.json)"


def contest() -> Iterator[str]:
    many, one = (result("one-way")["together"]["median"][clients] for clients in ("16", "1"))
    for name in CONTESTANTS:
        figures = (f"{many[name]['images_per_s']:.0f}", f"{many[name]['cpu_ms']:.1f}")
        yield row(*figures, f"{one[name]['p50_ms']:.1f}")


def plans() -> Iterator[str]:
    for path in sorted((ROOT / "tests/load/results").glob("plans*.json")):
        for of_name in result(path.stem)["plans"]["median"].values():
            own = (of_name[name] for name in (*CONTESTANTS, "fast"))
            figures = (f"{one['images_per_s']:.0f}, {one['cpu_ms']:.1f}" for one in own)
            yield row(*figures, f"{of_name['fast']['of_tandem']:.2f}", of=path.stem)


def overloads() -> Iterator[str]:
    newer = sorted(path.stem for path in (ROOT / "tests/load/results").glob("overload-when-full*"))
    for name in ("overload-vnni", "overload", "overload-apart", *newer):
        content = result(name)
        for times, goodput in content["median_goodput_share"].items():
            median, left = content["medians"][times], goodput["of_what_the_generator_left"]
            figures = [f"{left:.2f}", f"{median['p99_times_usual']:.1f}", f"{median['p50_ms']:.0f}"]
            digits = {"cpu_ms_a_refusal": 2, "answered_share": 3, "top1": 3, "fast_share": 2}
            for key, num in digits.items():  # older results lack some
                figures.append(f"{median[key]:.{num}f}" if key in median else "")
            yield row(*figures, of=name)


def performance() -> Iterator[str]:
    yield from contest()
    for name, group in SHARES.items():
        part = result(name)[group]
        of = (part["median"].get(load) for load in ("1", "16", "64"))
        shares = [f"{load['tandem']['of_yardstick']:.2f}" if load else "" for load in of]
        yield row(*shares, part.get("machine", result(name)["machine"])["commit"][:7], of=name)
    yield from plans()
    for name in ("startup-vnni", "startup"):
        content = result(name)
        seconds = (content["ready_after_s"]["median"], content["first_start_s"])
        memory_gb, cores = content["idle"]["pss_mb"] / 1e3, content["idle"]["cores"]
        yield row(*(f"{s:.0f}" for s in seconds), f"{memory_gb:.2f}", f"{cores:.2f}", of=name)
    for name in ("apart", "apart-vnni"):
        for form in ("tandem", "members", "apart"):
            many, one = (result(name)["apart"]["median"][load][form] for load in ("16", "1"))
            figures = (f"{many['images_per_s']:.0f}", f"{many['cpu_ms']:.1f}")
            yield row(*figures, f"{one['p50_ms']:.1f}", of=name)
    for nodes in result("node-scaling")["rows"]:
        figures = (f"{nodes['images_per_s']:.1f}", f"{nodes['of_linear']:.2f}")
        yield row(str(nodes["nodes"]), *figures)
    for share in ("0", "0.5", "0.9", "0.99"):
        rates = (result("cache")["median"][f"{where} {share}"] for where in ("none", "local"))
        yield row(f"{float(share):.0%}", *(f"{rate['images_per_s']:.0f}" for rate in rates))
    yield from overloads()


def killed(one):
    """Return the cells of a row of kills.json."""
    kinds = one["kinds"]
    told = sum(num for kind, num in kinds.items() if kind.endswith("_later"))
    told += kinds.get("not_ready", 0) + kinds.get("http_429", 0)
    gone = kinds.get("not_connected", 0)
    figures = (one["requests"], kinds.get("right", 0), told, gone)
    lost = one["requests"] - sum(figures[1:])
    seconds = (one["failing_for_s"], one["slowest_right_ms"] / 1e3)
    ended, code = one["command_ended_after_s"], one["exit_code"]
    command = "goes on" if ended is None else f"ends with {code} after {ended:.1f} s"
    cells = (*map(str, figures), str(lost), *(f"{each:.1f}" for each in seconds))
    return [one["killed"], *cells, command]


def faults() -> Iterator[str]:
    apart, head, whole = (result(f"faults{of}")["faults"] for of in ("", "-head", "-whole"))
    for faults in ({**apart, **head}, whole):
        for name, fault in faults.items():
            counts = (str(fault[what]) for what in ("accepted", "lost", "wrong"))
            what, seconds = f"`{name}`: {fault['fault']}", f"{fault['recovered_after_s']:.0f}"
            yield row(what, f"{fault['offered_per_s']:.0f}", *counts, seconds)
    for form in ("cluster-whole", "cluster"):
        for name, one in result(f"network-{form}")["rows"].items():
            counts = (str(one[what]) for what in ("accepted", "lost", "wrong"))
            took = (one["slowest_right_ms"] / 1e3, one["recovered_after_end_s"])
            sent = f"{one['sent_to_it_for_s']:.1f}" if "sent_to_it_for_s" in one else ""
            yield row(f"`{name}`: {one['row']}", *counts, *(f"{s:.1f}" for s in took), sent)
    for kills in result("kills")["kills"].values():
        for one in kills.values():
            yield row(*killed(one))
    attacks = [("hostile", result("hostile")["good_beside_hostile"])]
    attacks += [("crowding", result("crowding")["beside_large_pictures"]["good"])]
    shares, crowds = result("hostile_shares"), result("hostile_crowds")["crowds"]
    attacks += [("hostile_shares", shares[name]) for name in ("unread", "begun", "header")]
    stalls = ("stalled_calls", "crowd_on_one_member")
    attacks += [("hostile_crowds", crowds[name]["http"]) for name in stalls]
    for of, good in attacks:
        yield row(f"{good['sent']:,}", f"{good['right']:,}", f"{good['p99_ms']:.0f}", of=of)


@pytest.mark.parametrize(("page", "figures"), [("performance", performance), ("faults", faults)])
def test_every_line_of_the_tables_has_its_results_figures(page, figures):
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / f"docs/{page}.md").read_text("utf-8"), re.M)
    lines = [line for table in tables for line in table.split("\n")[2:-1]]
    pairs = zip(lines, figures(), strict=True)
    assert [(line, figure) for line, figure in pairs if not line.endswith(figure)] == []


def test_the_readme_has_the_table_of_speed():
    assert [line for line in contest() if line not in (ROOT / "README.md").read_text("utf-8")] == []


def test_the_pages_say_where_their_figures_were_measured():
    performance, faults = (
        " ".join((ROOT / f"docs/{page}.md").read_text("utf-8").split())
        for page in ("performance", "faults")
    )
    assert [name for name in ("one-way", "cache") if measured(name) not in performance] == []
    of_faults = ("faults", "faults-head", "faults-whole")
    assert [name for name in of_faults if measured(name) not in faults] == []
    run = result("serve-run")["serve-run"]["median"]["16"]["serve-run"]["of_tandem"]
    assert f"reaches {run:.2f} of `tandem serve`" in performance
    assert f"medians of {result('one-way')['rounds']} rounds" in performance
    house = result("house-vnni")["together"]["median"]
    before = (f"{house[load]['tandem:base']['of_yardstick']:.2f}" for load in ("1", "16", "64"))
    assert "had {}, {} and {} in the same run".format(*before) in performance
    head = result("faults-head")["faults"]["head"]
    placed = sum(sum(by_node.values()) for by_node in head["placement"].values())
    assert f"{head['replicas_kept']} of {placed} replicas go on meanwhile" in faults
    sent = result("hostile")["hostile"]["sent"]
    assert f"| {sent:,} malformed requests |" in faults
