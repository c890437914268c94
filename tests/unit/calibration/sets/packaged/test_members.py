"""``tandem models add`` of networks that packages ship."""

from collections.abc import Iterator
from pathlib import Path

import openvino as ov
import pytest
from typer.testing import CliRunner

from app.cli.main import app
from models.model_set import load_model_set
from tests.support.calibration.package_index import PackageIndex
from tests.support.tiny_networks import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
REQUIREMENT = "our-networks==2.1"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PackageIndex]:
    for name in ("data", "cache"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
    ov.save_model(tiny_model(), tmp_path / "net.xml")
    files = {f"nets/net.{end}": (tmp_path / f"net.{end}").read_bytes() for end in ("xml", "bin")}
    (tmp_path / "labels.txt").write_text("a\nb\nc\n", "utf-8")
    with PackageIndex() as served:
        served.set_for_pip(monkeypatch)
        served.sha256 = served.add("our-networks", "2.1", files)  # type: ignore[attr-defined]
        yield served


def add(folder: Path, member: str) -> tuple[int, str]:
    labels = str(folder / "labels.txt")
    result = CliRunner().invoke(
        app, ["models", "add", "ours", "--member", member, "--labels", labels]
    )
    return result.exit_code, " ".join(f"{result.output} {result.exception or ''}".split())


def test_a_member_comes_from_its_wheel_and_the_manifest_says_so(
    index: PackageIndex, tmp_path: Path
) -> None:
    code, said = add(tmp_path, f"one=pypi:{REQUIREMENT}:nets/net.xml")
    assert code == 0, said
    model_set = load_model_set("ours")
    assert model_set.problems() == []
    source = model_set.manifest.members[0].source
    assert source.startswith(f"{REQUIREMENT} (PyPI), nets/net.xml, wheel's sha256 ")
    assert source.endswith(index.sha256)  # type: ignore[attr-defined]


def test_a_pinned_wheel_that_is_another_and_a_file_that_is_missing(
    index: PackageIndex, tmp_path: Path
) -> None:
    code, said = add(tmp_path, f"one=pypi:{REQUIREMENT}@sha256={'0' * 64}:nets/net.xml")
    assert code != 0
    assert "is not the wheel that was pinned" in said
    code, said = add(tmp_path, f"one=pypi:{REQUIREMENT}:nets/other.xml")
    assert code != 0
    assert "has no file nets/other.xml; it has" in said


@pytest.mark.parametrize(
    "text",
    ["pypi:our-networks:net.xml", "pypi:a==1:../net.xml", "pypi:a==1:/net.xml", "pypi:--x==1:y"],
)
def test_what_names_no_file_of_a_package_is_refused(
    index: PackageIndex, tmp_path: Path, text: str
) -> None:
    code, said = add(tmp_path, f"one={text}")
    assert code != 0
    assert "write pypi:PACKAGE==VERSION:PATH" in said
    assert index.requests == []
