"""README.md and docs/use.md are true: commands run, code runs, tables are what the program says.

So are the commands of every other page, each pasted into a shell, but for those of ``NOT_RUN``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.ledger import current_records
from models.manifest import ENSEMBLE
from models.model_set import load_model_set
from tests.support.services.live_service import ROOT, Service, drawn_photo

LADDER = (ROOT / "docs/decisions/0036-one-machine-one-process.md").read_text("utf-8")
README, USE = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/use.md"))
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README + USE, re.MULTILINE | re.DOTALL)
MAKE_LINES = [
    line
    for kind, text in BLOCKS
    if kind == "sh" or "make " in text
    for line in text.replace("\\\n", "").splitlines()
    if kind == "sh" or line.startswith("make ")
]
TIMEOUT_S = 300
PAGES = sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/use.md"})
OF_PAGES = {
    str(page.relative_to(ROOT / "docs")): re.findall(
        r"^```(sh|python)\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    for page in PAGES
}
OWN_SET, CLUSTER = "it needs files of yours", "it needs a cluster"
NOT_RUN = {  # how commands begin that no test here pastes, and why
    "docker ": "it needs Docker's daemon and a network; test_container.py builds what it can",
    "kubectl ": "it needs Kubernetes; unit/launch/test_kubernetes.py renders what it applies",
    "helm ": "it needs Kubernetes",
    "sed -i": "REGISTRY is a registry of yours",
    "ray start": CLUSTER,
    "serve deploy": CLUSTER,
    "curl --data-binary @photo.jpg http://NODE": CLUSTER,
    ".venv/bin/python configs/kubernetes/render.py": "it writes into the checkout",
    ".venv/bin/python tests/load/faults.py": "it takes minutes",
    "haproxy ": "it runs until it is stopped; unit/launch starts it with this file",
    "prometheus ": "it runs until it is stopped; test_metrics.py starts one",
    "mlserver ": "MLServer is in an environment of its own; test_open_inference.py runs it",
    "curl -H 'Content-Type: application/json' localhost:8000/v1/feedback": "the id is of an answer "
    "of yours; test_samples.py reports some",
    "curl -X POST localhost:8000/v2/repository": "it needs a service of two sets; "
    "test_model_sets.py unloads and loads some",
    "export RAY_": "it names files of a root of yours; test_cluster_log.py makes one",
    "curl --data-binary @cat.jpg": f"{OWN_SET}; test_learned.py teaches some",
    "tandem learn pets --corrections": f"{OWN_SET}; test_learned.py learns from some",
    "tandem traffic": "it needs versions of a set; test_traffic.py runs it",
    "tandem models": f"{OWN_SET}; test_model_sets.py adds and pins sets",
    "tandem evaluate": OWN_SET,
    ".venv/bin/tandem models add": f"{OWN_SET}; test_model_sets.py adds sets",
    ".venv/bin/tandem quantize": f"{OWN_SET}; test_model_sets.py quantises a set",
    ".venv/bin/tandem evaluate": f"{OWN_SET}; test_model_sets.py evaluates a set",
    ".venv/bin/tandem learn": f"{OWN_SET}; test_learned.py learns sets",
    ".venv/bin/tandem classify --url https": "it needs a certificate of yours; test_access.py",
    ".venv/bin/tandem bench --url http://127.0.0.1:8001": "it loads the machine for a minute",
    ".venv/bin/pip install ./client": "it would change the environment; test_wheel.py installs it",
}
SHELL = [line for line in MAKE_LINES if not line.startswith("make ")]


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCKS if found == kind]


@pytest.fixture
def folder(tmp_path) -> Path:
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
    if "tandem classify " in pointed:  # classify-offline asks no service
        pointed += f" --url {service.url}"
    return pointed


def test_it_is_short_and_has_commands_and_code():
    assert len(README.split()) <= 900
    assert len(SHELL) >= 5
    assert len(blocks("python")) >= 1


@pytest.mark.parametrize("line", dict.fromkeys(SHELL))
def test_every_command_runs(line, folder, service):
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
def test_every_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("code", blocks("python"))
def test_the_python_code_prints_five_classes(code, folder, service):
    done = subprocess.run(
        [sys.executable, "-c", at(service, code)],
        cwd=folder,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.decode().splitlines()) == 5


def test_the_answer_has_the_shape_that_is_shown(service, folder):
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


def test_serve_says_what_is_shown(service):
    shown = next(text for text in blocks("text") if "ready at" in text)
    said = service.log.read_text()
    for line in at(service, shown).splitlines():
        assert line.strip() in said


def test_the_accuracy_table_is_the_manifests():
    (record,) = current_records(load_model_set("imagenette").manifest)
    card = (ROOT / "models/imagenette/README.md").read_text("utf-8")
    for row in accuracy_rows(record):
        assert row in card, row
    assert f"top-1 {record.scores['INT8'][ENSEMBLE].top1:.4f}" in README
    assert f"{record.num_images:,} photographs" in README


def test_the_bundled_int8_networks_keep_their_accuracy():
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


def accuracy_rows(record):
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


def cost(table, name, which, n):
    """Return a network's cost; the ensemble's is the sum of its members'."""
    names = list(table) if name == ENSEMBLE else [name]
    return f"{sum(table[member][which] for member in names):.{n}f}"


def is_whole(command: str) -> bool:
    """Whether bash would run it, or wait for more lines."""
    checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)
    return checked.returncode == 0 and not command.endswith("\\\n")


def commands(block: str) -> list[str]:
    """Return the commands of a block, each with all its lines."""
    found, command = [], ""
    for line in block.splitlines(keepends=True):
        command += line
        if is_whole(command):
            found.append(command.strip())
            command = ""
    assert not command, command
    return [command for command in found if command]


def reason_not_run(command: str) -> str | None:
    """Return how a command of ``NOT_RUN`` begins; None if it is pasted."""
    return next((begin for begin in NOT_RUN if command.startswith(begin)), None)


SERVES = re.compile(r"^(\w+=('[^']*'|\S+) )*\S*tandem serve\b")
PASTED = [page for page, found in OF_PAGES.items() if found]
PRINTS_NO_LABEL = re.compile(r"\.asked|> photos\.jsonl")  # although it has photo.jpg


@pytest.mark.slow
@pytest.mark.parametrize("page", PASTED)
def test_every_command_of_a_page_runs_in_turn(page, folder, service, grpc_port, photo_label):
    """``tandem serve`` with ``--print-config``: it reads and checks all that a start would."""
    for name in ("configs", "serve_config.yaml", "tests"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "serve_config.yaml", folder / "my.yaml")
    environment = {**os.environ, "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}"}
    for kind, block in OF_PAGES[page]:
        for text in [block] if kind == "python" else commands(block):
            if text.startswith("make "):
                test_every_make_target_exists(text.split()[1])
                continue
            if reason_not_run(text):
                continue
            command = text.partition(" #")[0].rstrip() if kind == "sh" else text
            if SERVES.match(command) and "--print-config" not in command:
                command += " --print-config"
            pasted = at(service, command).replace("127.0.0.1:9000", f"127.0.0.1:{grpc_port}")
            done = subprocess.run(
                [sys.executable, "-c", pasted] if kind == "python" else ["bash", "-c", pasted],
                cwd=folder,
                env=environment,
                capture_output=True,
                timeout=TIMEOUT_S,
            )
            output = (done.stdout + done.stderr).decode(errors="replace")
            assert done.returncode == 0, f"{text}\n{output}"
            assert '"error"' not in output, f"{text}\n{output}"
            if "photo.jpg" in text and not PRINTS_NO_LABEL.search(text):
                file = folder / "answer"  # of binary outputs
                said = output + (file.read_text(errors="replace") if file.exists() else "")
                assert photo_label in said, f"{text}\n{output}"


def test_what_is_not_pasted_is_in_a_page():
    used = {
        begin
        for found in OF_PAGES.values()
        for kind, block in found
        for command in (commands(block) if kind == "sh" else ())
        if (begin := reason_not_run(command)) is not None
    }
    assert set(NOT_RUN) - used == set()


def test_curl_is_there():
    assert shutil.which("curl"), "README's commands need curl: apt-get install curl"


def test_the_ladder_is_what_was_measured():
    ladder = json.loads((ROOT / "tests/load/results/ladder.json").read_text("utf-8"))
    rows = [
        f"| {rung['change']} | {rung['share']:.2f} | {rung['cpu_ms_per_image']:.1f} | "
        f"{rung['one_client_p50_ms']:.0f} |"
        for rung in ladder["rungs"]
    ]
    assert len(rows) >= 6
    for row in rows:
        assert row in LADDER, f"the table of decision 0036 has no {row}"
