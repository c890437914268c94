"""Every command's tables in a terminal of 80 columns: headings and figures are there, and whole."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from app.bench.measurement import Summary
from app.cli.bench import show_runs
from calibration.commands import quantize
from calibration.offline import Setup, UpperBound, show_bound
from calibration.quantization.quantize import Quantized
from calibration.quantization.quantize_set import MemberQuantization
from calibration.statistics import Paired
from tests.support.calibration.made_evaluations import measure, model_set_of
from tests.support.calibration.report_output import shown
from tests.support.command_line import tandem
from tests.support.tiny_networks import write_tiny_set

WIDTH = 80
LONG = "convnext_" + "x" * 54  # as long as a member's name may be
RULES = dict.fromkeys(map(ord, "┏━┳┓┃┡╇┩│└─┴┘"), " ")


def printed(show):
    out = io.StringIO()
    show(Console(file=out, width=WIDTH, soft_wrap=True, highlight=False))
    return out.getvalue()


def assert_whole(text: str, *words: str) -> None:
    assert "…" not in text
    tables = [line for line in text.splitlines() if set(line) & set("┏━┃│─└")]
    assert tables
    assert max(map(len, tables)) <= WIDTH
    found = text.translate(RULES).split()
    assert not set(words) - set(found)


def columns_of(text: str) -> list[str]:
    """Return each column of a table as one string, its cells' lines joined."""
    lines = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    return ["".join(cell.strip() for cell in column) for column in zip(*lines, strict=True)]


def summary(kind: str, offered: float, factor: float = 1.0) -> Summary:
    return Summary(
        kind=kind,
        offered=offered,
        duration_s=10.0,
        num_requests=480,
        num_ok=457,
        num_good=0,
        throughput=45.67 * factor,
        images_per_s=182.68 * factor,
        goodput=44.4 * factor,
        p50_ms=41.2 * factor,
        p90_ms=88.1 * factor,
        p99_ms=123.4 * factor,
        max_ms=345.6 * factor,
        errors={"http_429": int(23 * factor)},
        client_cpu_ms=0.31,
        service_cpu_ms=43.9,
        service_cpu_ms_by_stage={},
        is_saturated=False,
    )


def test_bench_of_any_size_and_its_limit():
    runs = [summary("closed", 8), summary("open", 12.5)]
    text = printed(lambda console: show_runs(console, runs, 100))
    headings = ("load", "ok", "images", "/s", "<100", "p50", "p90", "p99", "max", "errors", "CPU")
    figures = ("8", "12.5/s", "45.7", "182.7", "44.4", "41", "88", "123", "346", "23", "43.9")
    assert_whole(text, *headings, *figures)
    runs = [summary("closed", 1024, 1000.0), summary("open", 123456.5, 1000.0)]
    text = printed(lambda console: show_runs(console, runs, 1234.5))
    large = ("1024", "123456/s", "45670", "182680", "44400", "41200", "88100", "123400")
    assert_whole(text, "<1234.5", *large, "345600", "23000")
    best = Setup(batch_size=16, streams=128, threads=1)
    found = UpperBound("INT8", 4, best, 12345.6, 40.1, {best: 12345.6})
    text = printed(lambda console: show_bound(console, found))
    assert_whole(text, "streams", "threads", "batch", "images/s", "128", "12345.6")


@pytest.mark.parametrize("how", [("--apart",), ("--rate", "5000", "--survive-nodes", "100")])
def test_plan(tmp_path, how):
    file = tmp_path / "plan.json"
    text = tandem("plan", *how, "--json", file, columns=WIDTH).stdout
    plan = json.loads(file.read_text())
    for name, stage in plan["stages"].items():
        replicas = (str(stage["replicas_per_node"]), str(stage["replicas"]))
        assert_whole(text, name, *replicas, f"{stage['cpu_ms']:.1f}", f"{stage['cores']:g}")
    assert f"┃ a node ┃ in all ┃ busy ┃ {plan['survive_nodes']} dead ┃" in text


def test_plan_of_a_member_with_a_long_name(tmp_path):
    write_tiny_set(tmp_path / "set", gains={LONG: 4.0})
    text = tandem("plan", "--model-set", tmp_path / "set", "--apart", columns=WIDTH).stdout
    stages, _, forms = text.partition("the same load")
    assert_whole(stages, "Gateway", "22.0")
    assert LONG in columns_of(stages)[0]
    assert_whole(forms, "members", "apart", "replicas")


def test_models_list(tmp_path):
    folder = tmp_path / ("deep" * 30) / "own"
    folder.parent.mkdir()
    shutil.copytree(Path(__file__).parents[3] / "models" / "imagenette", folder)
    write_tiny_set(tmp_path / "sets" / "s", name="set-" + "y" * 59, gains={LONG: 4.0, "b": 4.0})
    found = ("--model-dir", folder.parent, "--model-dir", tmp_path / "sets")
    text = tandem("models", "list", *found, columns=WIDTH).stdout
    assert_whole(text, "set", "classes", "input", "members", "top-1", "ensemble", "128", "3")
    top1 = json.loads(tandem("models", "list", *found, "--json").stdout)[0]["top1"]
    assert_whole(text, *(f"{value:.4f}" for value in top1.values()))
    assert "set-" + "y" * 59 in columns_of(text)[0]
    assert f"{LONG}," in columns_of(text)[3]
    assert f"imagenette: {folder}\n" in text  # in one piece, to be copied


def test_classify(tmp_path, server):
    """The answers are made here; a service gives them in tests/e2e/shipped/test_classify.py."""
    label = "English_springer_" + "z" * 40
    other = "Welsh_springer_" + "z" * 40
    opinion = {"label": other, "probability": 0.97, "predictions": []}
    answer = {
        "model_set": "imagenette",
        "predictions": [{"index": 1, "label": label, "probability": 0.984}],
        "members": {name: opinion for name in ("resnet50", "densenet169")},
        "agreement": False,
        "degraded": True,
        "request_id": "0",
        "timings_ms": {"total": 1.0, "stages": []},
        "missing_members": {"vgg": "no answer in time"},
    }
    server.answer = lambda _: (200, json.dumps(answer).encode())
    photo = tmp_path / ("holiday" * 12 + ".jpg")
    photo.write_bytes(b"")
    text = tandem("classify", photo, "--url", server.url, columns=WIDTH).stdout
    assert_whole(text, "file", "label", "probability", "members", "0.984", "0.97,", "0.97;")
    names, labels, _, told = columns_of(text)
    assert (names, labels) == (str(photo), label)
    assert told.count(other) == 2


def test_quantize():
    outcome = MemberQuantization(
        {
            "densenet169": Quantized(None, Paired(1000, 13, 0), 0.1234, ("a",) * 120),
            LONG: Quantized(None),
        }
    )
    text = printed(lambda console: console.print(quantize._table(outcome)))
    assert_whole(text, "member", "drop", "before", "layers", "kept", "+1.30", "+12.34", "120")
    assert "│ not measured " in text
    assert LONG in columns_of(text)[0]


@pytest.mark.parametrize("members", [("resnet50", "densenet169"), (LONG, "densenet169")])
def test_evaluate(tmp_path, members):
    model_set = model_set_of(tmp_path / "set", members=members)
    measured = measure(model_set, float_answer=(0, 0, 1, 1, 1, 2, 2, 2, 2, 0))
    for name in members:
        measured.cpu_ms_per_image[name] = {"FP16": 1234.5, "INT8": 20.5}
    text = shown(model_set, measured, width=WIDTH)
    scores = ("network", "top-1", "top-5", "ECE", "MB", "CPU", "1234.5", "0.596-0.982", "2469.0")
    drops = ("points", "McNemar", "known", "+20.00", "-13.30", "+50.98", "0.500", "+0.50")
    assert_whole(text.replace(LONG, ""), *scores, *drops)
