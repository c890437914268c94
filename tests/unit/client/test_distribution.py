"""The client as a distribution of its own: small, typed, and without the service."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.support.http_server import FakeServer

ROOT = Path(__file__).parents[3]
CLIENT = ROOT / "client"
README = (CLIENT / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((CLIENT / "pyproject.toml").read_text("utf-8"))["project"]


def test_it_depends_on_httpx_and_numpy_alone_which_the_service_has_too(project):
    assert [Requirement(each).name for each in project["dependencies"]] == ["httpx", "numpy"]
    extras = project["optional-dependencies"]
    assert {name: [Requirement(each).name for each in of] for name, of in extras.items()} == {
        "grpc": ["grpcio", "protobuf"],
        "images": ["pillow"],
    }
    assert "3.10" in SpecifierSet(project["requires-python"])
    # The service brings the client's code, and so must bring what that imports.
    service = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = {Requirement(each).name for each in service["dependencies"]}
    both = [*project["dependencies"], *project["optional-dependencies"]["grpc"]]
    assert {Requirement(each).name for each in both} <= names


def test_the_messages_run_on_the_protobuf_that_it_asks_for(project):
    made_with = re.search(
        r"Protobuf Python Version: (\S+)",
        (CLIENT / "tandem_client" / "tandem_pb2.py").read_text("utf-8"),
    )
    assert made_with
    (protobuf,) = (
        Requirement(each)
        for each in project["optional-dependencies"]["grpc"]
        if each.startswith("protobuf")
    )
    assert str(protobuf.specifier) == f">={made_with[1]}"


def test_importing_it_takes_nothing_of_the_service():
    """Nor NumPy, before there is an array."""
    script = "import sys, tandem_client; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=CLIENT, capture_output=True, text=True, check=True
    )
    taken = set(done.stdout.split())
    assert "httpx" in taken
    unwanted = {"ray", "openvino", "cv2", "grpc", "google", "numpy", "PIL", "pydantic"}
    unwanted |= {"app", "models"}
    assert taken & unwanted == set()


def test_an_editable_installation_of_the_project_finds_it(tmp_path):
    """`pip install -e .`, so that no index has to serve tandem-serve-client."""
    build = f"from hatchling.build import build_editable; print(build_editable({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        paths = wheel.read("_tandem_serve.pth").decode().split()
    assert paths == [str(ROOT), str(CLIENT)]


def test_it_is_typed_and_has_the_projects_license():
    assert (CLIENT / "tandem_client" / "py.typed").exists()
    assert (CLIENT / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize(
    "code", re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
)
def test_the_code_of_its_readme_runs(code, tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("photo.jpg", "other.jpg", "photos/a.jpg", "photos/b.jpg"):
        (tmp_path / name).write_bytes(b"photo")
    with FakeServer() as server:
        done = subprocess.run(
            [sys.executable, "-c", code.replace("http://127.0.0.1:8000", server.url)],
            cwd=tmp_path,
            env={"PYTHONPATH": str(CLIENT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert "tench" in done.stdout
