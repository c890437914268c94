"""README.md is true: its commands run, its code runs, its tables are what the program says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from models.accuracy import ENSEMBLE, AccuracyRecord
from models.ledger import current_records
from models.model_set import load_model_set
from models.record import Precision
from tests.support.services.live_service import ROOT, Service, drawn_photo

DECISIONS = (ROOT / "app/DECISIONS.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
MAKE_LINES = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
TIMEOUT_S = 300
SHELL = [line for line in MAKE_LINES if not line.startswith("make ")]


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCKS if found == kind]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder as a reader's, with two photos and the project's commands."""
    (tmp_path / "photo.jpg").write_bytes(drawn_photo(seed=3))
    (tmp_path / "other.jpg").write_bytes(drawn_photo(seed=4))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    return tmp_path


def at(service: Service, text: str) -> str:
    """Point what README says of port 8000 at the tests' service."""
    host = service.url.removeprefix("http://")
    pointed = text.replace("127.0.0.1:8000", host).replace("localhost:8000", host)
    if "tandem classify" in pointed:
        pointed += f" --url {service.url}"
    return pointed


def test_it_is_short_and_has_commands_and_code() -> None:
    assert len(README.splitlines()) < 200
    assert len(SHELL) >= 6
    assert len(blocks("python")) >= 1


@pytest.mark.parametrize("line", SHELL)
def test_every_command_runs(line: str, folder: Path, service: Service) -> None:
    environment = {**os.environ, "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        at(service, line),
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, output
    assert '"error"' not in output


@pytest.mark.parametrize("target", [li.split()[1] for li in MAKE_LINES if li.startswith("make ")])
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_code_prints_five_classes(code: str, folder: Path, service: Service) -> None:
    done = subprocess.run(
        [sys.executable, "-c", at(service, code)],
        cwd=folder,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.decode().splitlines()) == 5


def test_the_answer_has_the_shape_that_is_shown(service: Service, folder: Path) -> None:
    shown = json.loads(blocks("json")[0])
    line = next(line for line in SHELL if "top_k=1" in line)
    done = subprocess.run(
        at(service, line), shell=True, cwd=folder, capture_output=True, timeout=TIMEOUT_S
    )
    answer = json.loads(done.stdout)
    assert answer.keys() == shown.keys()
    assert answer["predictions"][0].keys() == shown["predictions"][0].keys()
    assert answer["members"].keys() == shown["members"].keys()
    assert answer["timings_ms"].keys() == shown["timings_ms"].keys()


def test_serve_says_what_is_shown(service: Service) -> None:
    shown = next(text for text in blocks("text") if "ready at" in text)
    said = service.log.read_text()
    for line in at(service, shown).splitlines():
        assert line.strip() in said


def test_the_settings_table_is_the_programs() -> None:
    table = (ROOT / "configs" / "README.md").read_text("utf-8").splitlines()
    for name, field in Settings.model_fields.items():
        row = next((li for li in table if li.startswith(f"| `{name}` |")), None)
        assert row, f"the table of configs/README.md has no {name}"
        assert field.description
        assert field.description in row


@pytest.mark.parametrize("path", ["README.md", "models/imagenette/README.md"])
def test_the_accuracy_table_is_the_manifests(path: str) -> None:
    model_set = load_model_set("imagenette")
    (record,) = current_records(model_set.manifest)
    text = (ROOT / path).read_text("utf-8")
    for row in accuracy_rows(record):
        assert row in text, row


def test_the_bundled_int8_networks_keep_their_accuracy() -> None:
    """What issue after issue asks of the bundled set, from its own ledger."""
    manifest = load_model_set("imagenette").manifest
    (record,) = current_records(manifest)
    assert manifest.max_drop == 0.005
    assert max(drop.top1 for drop in record.drops.values()) <= manifest.max_drop
    assert record.num_images == 1451
    assert record.scores["INT8"][ENSEMBLE].calibration_error <= 0.03
    for scores in record.scores.values():
        best = max(score.top1 for name, score in scores.items() if name != ENSEMBLE)
        assert scores[ENSEMBLE].top1 >= best


def accuracy_rows(record: AccuracyRecord) -> list[str]:
    """Return the rows of the table as README and the card have them."""
    rows = []
    for name in (*record.fingerprints, ENSEMBLE):
        before, after = (record.scores[p][name] for p in ("FP16", "INT8"))
        drop = record.drops[name]
        low, high = (f"{bound * 100:+.2f}" for bound in drop.interval)
        rows.append(
            f"| {name} | {before.top1:.4f} | {after.top1:.4f} | "
            f"{drop.top1 * 100:+.2f} ({low} to {high}) | "
            f"{cost(record.size_mb, name, 'FP16', 1)} | {cost(record.size_mb, name, 'INT8', 1)} | "
            f"{cost(record.cpu_ms_per_image, name, 'FP16', 1)} | "
            f"{cost(record.cpu_ms_per_image, name, 'INT8', 1)} |"
        )
    return rows


def cost(table: dict[str, dict[Precision, float]], name: str, which: Precision, n: int) -> str:
    """Return a network's cost; the ensemble's is the sum of its members'."""
    names = list(table) if name == ENSEMBLE else [name]
    return f"{sum(table[member][which] for member in names):.{n}f}"


def test_the_layout_names_what_is_there() -> None:
    for folder in re.findall(r"^\| `(\w+)/` \|", README, re.MULTILINE):
        assert (ROOT / folder).is_dir()


def test_every_link_to_a_file_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_curl_is_there() -> None:
    assert shutil.which("curl"), "README's commands need curl: apt-get install curl"


def test_the_ladder_is_what_was_measured() -> None:
    ladder = json.loads((ROOT / "tests/load/results/ladder.json").read_text("utf-8"))
    rows = [
        f"| {rung['change']} | {rung['share']:.2f} | {rung['cpu_ms_per_image']:.1f} | "
        f"{rung['one_client_p50_ms']:.0f} |"
        for rung in ladder["rungs"]
    ]
    assert len(rows) >= 6
    for row in rows:
        assert row in DECISIONS, f"the table in app/DECISIONS.md has no {row}"


def result_of(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"tests/load/results/{name}.json").read_text("utf-8"))


def test_the_overhead_is_what_was_measured() -> None:
    result = result_of("overhead-vnni")
    of_load = result["together"]["median"]
    for name in of_load["16"]:
        many, forms, one = (of_load[load][name] for load in ("16", "forms", "1"))
        shares = [f"{row['of_bound']:.2f}" if "of_bound" in row else "1" for row in (many, forms)]
        figures = [f"{many['images_per_s']:.0f}", *shares]
        figures += [f"{many['cpu_ms']:.1f}", f"{one['p50_ms']:.1f}"]
        assert f"| {' | '.join(figures)} |" in README, f"README's table has no {name}: {figures}"
    assert len(of_load["16"]) == 4
    cheap = result_of("overhead-80-vnni")["together"]["median"]["16"]["tandem"]["by_thread"]
    networks_ms = cheap["Gateway"]["native"]
    for file, group, row in (
        ("overhead-vnni", "together", "128 px"),
        ("overhead-224-vnni", "together", "224 px"),
        ("overhead-80-vnni", "together", f"80 px, networks of {networks_ms:.1f} CPU-ms"),
        ("overhead-vnni", "null", "networks that cost nothing"),
        ("overhead", "together", "AMX, 128 px"),
        ("overhead-224", "together", "AMX, 224 px"),
    ):
        of_file = result_of(file)[group]["median"]
        shares = [
            f"{of_file[load]['tandem']['of_yardstick']:.2f}" if load in of_file else ""
            for load in ("1", "16", "64")
        ]
        (found,) = [line for line in README.splitlines() if line.startswith(f"| {row}")]
        assert file in found
        assert [cell.strip() for cell in found.split("|")[2:5]] == shares, found
    of_16 = result_of("overhead-16-vnni")
    assert of_16["rounds"] == 12
    assert len(of_16["together"]["turns"]) == 12 * len(of_16["together"]["median"]["16"])
    words = " ".join(README.split())
    row = of_16["together"]["median"]["16"]
    figures = [row["tandem"]["of_yardstick"]]
    figures += [row[name]["cpu_ms_above_bound"] for name in ("tandem", "yardstick")]
    told = "had {:.2f}, and {:.1f} CPU-ms an image above the bound, that server {:.1f}"
    assert told.format(*figures) in words, figures
    of_null = result["null"]["median"]
    assert len(result["null"]["turns"]) == 5 * sum(map(len, of_null.values()))
    assert "medians of five rounds" in words
    rates = [f"{of_null['16'][name]['images_per_s']:.0f}" for name in ("tandem", "yardstick")]
    assert "16 clients: {} requests/s, that server {})".format(*rates) in words, rates
    share = result_of("serve-run")["serve-run"]["median"]["16"]["serve-run"]["of_tandem"]
    assert f"reaches {share:.2f} of `tandem serve`" in words


def test_start_and_rest_are_what_was_measured() -> None:
    words = " ".join(README.split())
    for file, told in (
        (
            "startup-vnni",
            "ready after {:.0f} s, {:.0f} s when it has to compile; "
            "at rest it takes {:.2f} GB and {:.2f} of a core",
        ),
        ("startup", "on that Xeon {:.0f} s, {:.0f} s, {:.2f} GB and {:.2f}"),
    ):
        found, idle = result_of(file), result_of(file)["idle"]
        seconds = found["ready_after_s"]["median"], found["first_start_s"]
        figures = *seconds, idle["pss_mb"] / 1e3, idle["cores"]
        assert told.format(*figures) in words, figures
    memory = result_of("backlog")["128_px"]["pss_mb"]
    more = (memory["on"] - memory["off"]) / 1e3
    assert f"{more:.1f} GB more once many images have waited" in words, more


def test_the_faults_are_what_was_measured() -> None:
    faults = json.loads((ROOT / "tests/load/results/faults.json").read_text("utf-8"))["faults"]
    rows = [
        f"| `{name}`: {one['fault']} | {one['offered_per_s']:.0f} | {one['accepted']} | "
        f"{one['lost']} | {one['wrong']} | {one['recovered_after_s']:.0f} |"
        for name, one in faults.items()
    ]
    assert len(rows) >= 7
    hostile = json.loads((ROOT / "tests/load/results/hostile.json").read_text("utf-8"))
    good, num = hostile["good_beside_hostile"], hostile["hostile"]["sent"]
    rows.append(
        f"| {num:,} hostile requests in {good['s']:.0f} s beside good ones | "
        f"{hostile['good_rate']:.0f} | {good['sent']} | {good['sent'] - good['right']} | 0 | |"
    )
    for row in rows:
        assert row in README, f"README's table has no {row}"
    overload = json.loads((ROOT / "tests/load/results/overload.json").read_text("utf-8"))
    words = " ".join(README.split())
    for times, share in overload["median_goodput_share"].items():
        told = share["of_what_the_generator_left"]
        assert f"{told:.2f} at {times}" in words
        assert told >= 0.9
