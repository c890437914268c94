"""The servers that tests/load/overhead.py compares, and how each is started."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from machine import ROOT
from running import TANDEM, Running, running

from app.launch.checks import free_port

YARDSTICK = "yardstick"
LOCAL_RAY = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class Contestant:
    """A server: a command that takes ``--port``, or one that knows its port."""

    name: str
    command: list[str]
    folder: Path = ROOT
    environment: dict[str, str] = field(default_factory=dict)
    port: int | None = None


@dataclass(frozen=True)
class Other:
    """Another checkout: its ``tandem``, run in its folder."""

    tandem: str
    folder: Path

    @classmethod
    def parse(cls, text: str) -> "Other":
        tandem, _, folder = text.partition(":")
        if not (Path(tandem).is_file() and Path(folder).is_dir()):
            raise SystemExit(f"--also-tandem {text!r}: give BIN:FOLDER, a file and a folder")
        return cls(str(Path(tandem).absolute()), Path(folder).absolute())

    @property
    def name(self) -> str:
        return self.folder.name


def yardstick(model_set: str, *options: str) -> Contestant:
    script = str(ROOT / "tests" / "load" / "yardstick.py")
    return Contestant(YARDSTICK, [sys.executable, script, "--model-set", model_set, *options])


def tandems(name, model_set, config, others):
    """Return ``tandem serve`` of this checkout, and of the others with their own configuration."""
    arguments = ["serve", "--model-set", model_set, *(["--config", config] if config else [])]
    found = [Contestant(name, [TANDEM, *arguments])]
    for other in others:
        command = [other.tandem, *arguments]
        found.append(Contestant(f"{name}:{other.name}", command, other.folder))
    return found


def members_apart(folder: Path) -> Path:
    """Write configs/separate.yaml with the Decoder in the Gateway's process; return its path."""
    content = yaml.safe_load((ROOT / "configs" / "separate.yaml").read_text("utf-8"))
    (application,) = content["applications"]
    application["args"]["decoder"] = "gateway"
    application["deployments"] = [d for d in application["deployments"] if d["name"] != "Decoder"]
    path = folder / "members_apart.yaml"
    path.write_text(yaml.safe_dump(content), "utf-8")
    return path


def serve_run(model_set: str, folder: Path) -> Contestant:
    """Return plain ``serve run serve_config.yaml``: Serve's own environment, no HAProxy."""
    content = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
    port = free_port()
    content["http_options"]["port"] = port
    content["applications"][0]["args"]["model_set"] = model_set
    path = folder / "serve_run.yaml"
    path.write_text(yaml.safe_dump(content), "utf-8")
    serve = str(Path(sys.executable).with_name("serve"))
    return Contestant("serve-run", [serve, "run", str(path)], ROOT, LOCAL_RAY, port)


@contextmanager
def all_running(contestants: Sequence[Contestant]) -> Iterator[dict[str, Running]]:
    """Start one after the other; yield all that run, at rest."""
    with ExitStack() as stack:
        yield {
            one.name: stack.enter_context(
                running(one.command, one.environment, folder=one.folder, port=one.port)
            )
            for one in contestants
        }
