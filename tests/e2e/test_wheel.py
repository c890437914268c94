"""The wheel in an environment that has never seen this folder: the command works from anywhere.

The launcher's own tests (tests/unit/cli/test_launcher.py) are in the fast tier.
"""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.calibration.package_index import PackageIndex
from tests.support.services.live_service import ROOT, Service

pytestmark = pytest.mark.slow
# Of those who run the tests; PYTHONPATH could make the checkout importable.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
MAX_WHEEL_BYTES = 60_000_000  # the bundled float networks, which serving does not need, have 70
FETCH = ("models", "fetch", "imagenette-float")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*command, cwd, environment=None):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**ENVIRONMENT, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    (path,) = folder.glob("tandem_serve-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    return environment_with(wheel, tmp_path_factory.mktemp("environment"))


def environment_with(wheel: Path, folder: Path) -> Path:
    """Install the wheel into a new environment; return its folder of commands.

    What it depends on is borrowed from the environment of the tests, whose .pth files are not read
    from here: a checkout that is installed there is not importable.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    # First: it would take a checkout that is installed there for the same version.
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    )
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return folder / "bin"


@pytest.fixture
def empty(tmp_path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_the_wheel_has_one_package_and_everything_in_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tandem", "tandem_serve"}
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    wanted = ("serve_config.yaml", "models/imagenette/manifest.yaml", "app/http/page/index.html")
    assert {f"tandem/{name}" for name in wanted} <= set(names)
    folders = ("app", "models", "calibration", "configs", "client/tandem_client")
    tracked = run("git", "ls-files", *folders, cwd=ROOT).split()
    left_out = {f"tandem/{name}" for name in tracked} - set(names)
    float_networks = {name for name in left_out if Path(name).match("models/imagenette/*-fp16.*")}
    assert len(float_networks) == 4
    assert left_out - float_networks == {"tandem/app/cli/launcher.py"}  # it is the package itself
    assert "tandem/__init__.py" in names


def test_the_client_alone_brings_nothing_of_the_service(tmp_path):
    """Its dependencies are compared in tests/unit/client/test_distribution.py."""
    source = ROOT / "client"
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("tandem_serve_client-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"tandem_client"}
    assert "tandem_client/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    venv.create(tmp_path / "environment", symlinks=True)
    python = tmp_path / "environment" / "bin" / "python"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    script = "from importlib.metadata import requires; print(requires('tandem-serve-client'))"
    said = run(python, "-c", script, cwd=tmp_path)
    assert "httpx" in said
    assert "ray" not in said


@pytest.mark.parametrize("name", ["app", "models", "calibration", "tandem_client"])
def test_other_programs_have_nothing_new_to_import(installed, empty, name):
    script = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    assert run(installed / "python", "-c", script, cwd=empty) == "None\n"


def test_the_commands_of_calibration_are_there(installed, empty):
    help_text = run(installed / "tandem", "--help", cwd=empty)
    assert {"quantize", "evaluate", "serve"} <= set(help_text.split())


def test_a_program_classifies_without_a_service(installed, empty, photo, photo_label):
    (empty / "photo.jpg").write_bytes(photo)
    script = "import tandem; print(tandem.load().classify('photo.jpg').label)"
    assert run(installed / "python", "-c", script, cwd=empty).strip() == photo_label


def test_the_bundled_set_is_whole_without_its_float_networks(installed, empty):
    said = run(installed / "tandem", "models", "verify", "imagenette", cwd=empty)
    assert said.startswith("ok imagenette: 8 files, every network answers as recorded")
    assert "tandem models fetch imagenette-float brings the bundled set's" in said


def test_the_float_networks_come_from_a_wheel_of_their_own(wheel, empty, tmp_path):
    """As ``pip`` finds it on an index; the hashes are those of the installed manifest."""
    source = ROOT / ".ci" / "imagenette-float"
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source, cwd=tmp_path)
    tandem = environment_with(wheel, tmp_path / "environment") / "tandem"
    with PackageIndex() as index:
        (built,) = tmp_path.glob("*.whl")
        index.wheels[built.name] = built.read_bytes()
        environment = {**index.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        said = run(tandem, *FETCH, cwd=empty, environment=environment)
    assert "has its float networks: 4 files came" in said.replace("\n", " ")
    said = run(tandem, "models", "verify", "imagenette", cwd=empty)
    assert said.strip() == "ok imagenette: 12 files, every network answers as recorded"


def test_serve_in_an_empty_folder(installed, empty, tmp_path, temp, free_port, photo, photo_label):
    command, port = installed / "tandem", free_port()
    serve = [str(command), "serve", "--port", str(port)]
    environment, log = ENVIRONMENT | {"TMPDIR": str(temp)}, tmp_path / "log.txt"
    service = Service(port, log=log, command=serve, folder=empty, environment=environment)
    try:
        service.wait_ready()
        (tmp_path / "photo.jpg").write_bytes(photo)
        said = run(command, "classify", tmp_path / "photo.jpg", "--url", service.url, cwd=empty)
        assert photo_label in said
    finally:
        code = service.stop()
    assert code == 0
    assert list(empty.iterdir()) == []
