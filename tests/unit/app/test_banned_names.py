"""What app/ruff.toml bans is found wherever it is imported, but for the modules that it names."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RUFF = Path(sys.executable).with_name("ruff")
BANNED = {
    "import ray._private.node": "launch/ray_features.py",
    "from ray._private.utils import set_sigterm_handler": "launch/ray_features.py",
    "from ray.serve._private.constants import SERVE_CONTROLLER_NAME": "launch/ray_features.py",
    "from ray.serve import _private": "launch/ray_features.py",
    "from ray.serve.context import _get_global_client": "launch/ray_features.py",
    "from grpc.aio._server import Server": "serve/replica.py",
    "import os; os.environ.get('HOME')": "environment.py",
    "import os; os.getenv('HOME')": "environment.py",
    "from os import environ": "environment.py",
    "from unittest import mock": None,
    "from unittest.mock import patch": None,
}


def findings(code: str, path: str) -> str:
    options = ["--select", "TID251", "--no-cache", "--stdin-filename", path, "-"]
    line: list[str | Path] = [RUFF, "check", *options]
    done = subprocess.run(line, input=code, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("where", ["at the top", "in a function"])
@pytest.mark.parametrize(("code", "allowed"), BANNED.items())
def test_a_banned_name_is_found(code: str, allowed: str | None, where: str) -> None:
    if where == "in a function":
        code = f"def late() -> None:\n    {code}\n"
    for path in ("app/launch/serve.py", "app/serve/gateway.py", "app/cli/serve.py"):
        assert "TID251" in findings(code, path), path
    if allowed is not None:
        assert "TID251" not in findings(code, f"app/{allowed}")


def test_calibration_has_no_mocks_either() -> None:
    assert "TID251" in findings("from unittest import mock", "calibration/sets/convert.py")
    assert "TID251" not in findings("from unittest import mock", "tests/unit/conftest.py")
