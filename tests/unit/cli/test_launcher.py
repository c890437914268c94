"""The launcher as a wheel has it: a package beside whose code the others lie."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import launcher
from tests.support.tiny_networks import expected_label, picture

ROOT = Path(__file__).parents[3]
OTHER = "/other/packages"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """As an installation's folder of packages: ``tandem``, and nothing else of ours."""
    package = tmp_path / "site" / "tandem"
    package.mkdir(parents=True)
    shutil.copy(launcher.__file__, package / "__init__.py")
    for name in ("app", "models", "calibration", "client", "serve_config.yaml"):
        (package / name).symlink_to(ROOT / name)
    return package.parent


def run(site: Path, script: str, *arguments: str, path: str = "") -> str:
    """Run a script that finds ``tandem`` as an installed program does, not by PYTHONPATH."""
    start = f"import sys; sys.path.insert(1, {str(site)!r}); import tandem; {script}"
    command, env = [sys.executable, "-c", start, *arguments], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=site, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_it_starts_imports_from_the_package_too_and_first(site: Path) -> None:
    child = "import app, sys; print(app.__path__[0]); print(sys.path[1:3])"
    script = f"""
import os, subprocess
import app.cli.main as command
command.main = lambda: subprocess.run([sys.executable, "-c", {child!r}], check=True)
tandem.main()"""
    # app is imported here for the fake only, from where the launcher will find it.
    start = f"sys.path.insert(0, {str(site / 'tandem')!r})"
    printed = run(site, f"{start}\n{script}", path=OTHER)
    package = str(site / "tandem")
    assert printed.splitlines() == [f"{package}/app", str([package, OTHER])]


def test_the_command_says_where_its_configurations_are_and_nodes_where_packages_are(site, tmp_path):
    assert run(site, "tandem.main()", "environment", "--where") == f"{site / 'tandem'}\n"
    exports = run(site, "tandem.main()", "environment", "--folder", str(tmp_path))
    shell = f'PYTHONPATH={OTHER}\n{exports}\nprintf %s "$PYTHONPATH"'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout == f"{site / 'tandem'}:{OTHER}"


def test_in_a_checkout_there_is_nothing_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tandem", "environment", "--where"])
    before = list(sys.path), os.environ.get("PYTHONPATH")
    with pytest.raises(SystemExit) as ended:
        launcher.main()
    assert ended.value.code == 0
    assert (list(sys.path), os.environ.get("PYTHONPATH")) == before


def test_a_program_loads_a_set_and_the_command_line_no_web_framework(site, tiny_set):
    # FastAPI fails on an OTEL_PROPAGATORS that serve leaves out; and importing it takes time.
    script = "import app.cli.serve, app.launch.serve; print('fastapi' in sys.modules)"
    assert run(site, script, path=str(ROOT)).strip() == "False"
    (picture_file := site / "green.png").write_bytes(picture("green"))
    script = f"print(tandem.load({str(tiny_set)!r}).classify({str(picture_file)!r}).label)"
    assert run(site, script).strip() == expected_label("green")


def test_a_program_with_modules_of_the_same_names_is_told(site: Path) -> None:
    (site / "models.py").write_text("ours = True\n")
    script = """
try:
    tandem.load()
except ImportError as error:
    print(error)
import models; print(models.ours)"""
    said, ours = run(site, script).splitlines()
    assert f"this program has another one ({site / 'models.py'})" in said
    assert ours == "True"


def test_a_folder_without_an_init_hides_no_module(site: Path, tiny_set: Path) -> None:
    (site / "first" / "models").mkdir(parents=True)
    script = f"""
sys.path[:] = [{str(site / "first")!r}, *(p for p in sys.path if p != {str(ROOT)!r})]
print(type(tandem.load({str(tiny_set)!r})).__name__)"""
    assert run(site, script).strip() == "LocalEnsemble"
