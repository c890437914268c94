"""The files of configs/docker, compose and systemd: what they name is there, doors stay shut."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.launch.checks import METRICS_PORT
from tests.support.command_line import options_of

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"


def read_yaml(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text("utf-8"))


DOCKERFILE = (CONFIGS / "docker" / "Dockerfile").read_text("utf-8")
COMPOSE = CONFIGS / "compose"
SERVICES = read_yaml(COMPOSE / "compose.yaml")["services"]
UNIT = CONFIGS / "systemd" / "tandem.service"
SYSTEMD = shutil.which("systemd-analyze")
MAX_EXPOSURE = 2.5  # of 10, as systemd-analyze security has it; 2.1 with systemd 252


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and their arguments, lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]  # type: ignore[misc]


def test_what_is_copied_is_in_the_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    copied = [a.split()[:-1] for name, a in instructions() if name == "COPY" and "--from" not in a]
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists(), name
        assert f"!{name.partition('/')[0]}" in ignored


def test_the_base_is_pinned_and_everything_starts_from_it() -> None:
    base = next(a for name, a in instructions() if name == "ARG")
    pinned = r"BASE=docker\.io/library/python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64}"
    assert re.fullmatch(pinned, base)
    assert [a for name, a in instructions() if name == "FROM"] == ["${BASE} AS build", "${BASE}"]


def test_dependencies_are_installed_before_the_code_comes() -> None:
    order = [f"{name} {argument}" for name, argument in instructions()]
    (installed,) = [i for i, line in enumerate(order) if "pip install" in line]
    code = [i for i, line in enumerate(order) if re.fullmatch(r"COPY (\w+) \1", line)]
    assert len(code) == 5
    assert installed < min(code)


def test_the_image_runs_as_a_user_of_its_own_and_checks_itself() -> None:
    by_name = dict(instructions())
    assert by_name["USER"] == "10001:10001"
    assert "HOME=/tmp" in by_name["ENV"]
    assert "/readyz" in by_name["HEALTHCHECK"]
    words = json.loads(by_name["ENTRYPOINT"]) + json.loads(by_name["CMD"])
    assert words[:2] == ["tandem", "serve"]
    assert {w for w in words if w.startswith("--")} <= options_of("serve")
    assert by_name["EXPOSE"].split() == ["8000", str(METRICS_PORT)]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_on_loopback_and_its_files_are_there(name: str) -> None:
    service = SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for volume in service.get("volumes", []):
        source, _, mode = volume.rsplit(":", 2)
        assert (COMPOSE / source).is_file()
        assert mode == "ro"
    assert set(service.get("depends_on", [])) <= set(SERVICES)
    if build := service.get("build"):
        assert (COMPOSE / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()
    else:
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])


def test_the_container_is_closed() -> None:
    closed = {
        "read_only": True,
        "tmpfs": ["/tmp:exec"],  # Docker's default forbids to run HAProxy's command
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }
    assert SERVICES["tandem"] | closed == SERVICES["tandem"]


def test_prometheus_and_grafana_look_where_the_others_are() -> None:
    ours = read_yaml(CONFIGS / "prometheus/prometheus.yaml")
    theirs = read_yaml(COMPOSE / "prometheus.yaml")
    (job,) = theirs["scrape_configs"]
    assert job["static_configs"][0].pop("targets") == [f"tandem:{METRICS_PORT}"]
    ours["scrape_configs"][0]["static_configs"][0].pop("targets")
    assert theirs == ours
    sources = read_yaml(COMPOSE / "grafana" / "datasources.yaml")["datasources"]
    hosts = {re.fullmatch(r"http://(\w+):\d+", s["url"])[1] for s in sources}  # type: ignore[index]
    assert hosts == {"prometheus", "jaeger"} <= set(SERVICES)
    (provider,) = read_yaml(COMPOSE / "grafana" / "dashboards.yaml")["providers"]
    mounted = [v.split(":")[1] for v in SERVICES["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/tandem.json" in mounted


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Return the unit as it is, but for a command that this machine has."""
    text = UNIT.read_text("utf-8").replace("/opt/tandem/bin/tandem", shutil.which("true") or "")
    path = tmp_path / UNIT.name
    path.write_text(text, "utf-8")
    return path


def test_the_unit_waits_for_ready_and_asks_the_command_alone_to_stop() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text("utf-8"), re.MULTILINE))
    assert (settings["Type"], settings["KillMode"]) == ("notify", "mixed")
    assert settings["ExecStart"] == "/opt/tandem/bin/tandem serve"
    # OpenVINO writes machine code and runs it.
    assert "MemoryDenyWriteExecute" not in settings


@pytest.mark.systemd
def test_systemd_takes_the_unit(unit: Path) -> None:
    said = subprocess.run([str(SYSTEMD), "verify", unit], capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.systemd
def test_systemd_calls_the_unit_closed(unit: Path) -> None:
    options = ["--offline=true", "--no-pager", f"--threshold={MAX_EXPOSURE * 10:.0f}"]
    command = [str(SYSTEMD), "security", *options, str(unit)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
