"""``tandem models history`` and ``pin``, and SET@VERSION where commands take a set."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from calibration.sets.transaction import change
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import load_model_set
from tests.support.calibration.staged_sets import with_network
from tests.support.command_line import tandem
from tests.support.tiny_networks import with_accuracy


@pytest.fixture
def sets(tiny_set, tmp_path) -> Path:
    """A folder of sets with one, in its second version; the first was measured."""
    folder = Path(shutil.copytree(tiny_set, tmp_path / "sets" / "tiny"))
    with change(folder) as staging:
        manifest = read_manifest(folder)
        staging.move_in(with_accuracy(manifest, {"sure": 0.5, "unsure": 0.25, "ensemble": 0.75}))
    with change(folder, "tandem quantize") as staging:
        staging.move_in(with_network(staging))
    return folder.parent


def facts(sets: Path) -> list[dict[str, Any]]:
    result = tandem("models", "history", "tiny", "--model-dir", sets, "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["set"], told["folder"], told["max_earlier"]) == ("tiny", str(sets / "tiny"), 5)
    return told["versions"]


def test_history_says_of_each_version_when_what_and_how_good(sets):
    current, earlier = facts(sets)
    assert current["version"] == load_model_set(str(sets / "tiny")).fingerprint()
    assert (current["current"], earlier["current"]) == (True, False)
    assert current["made"]["by"] == "tandem quantize"
    assert current["made"]["at"].endswith("Z")
    assert earlier["made"] is None
    assert current["accuracy"] == {}
    assert earlier["accuracy"] == {"top-1": {"INT8": 0.75}}
    assert earlier["fingerprints"] == {"INT8": earlier["version"]}
    table = tandem("models", "history", "tiny", "--model-dir", sets).stdout
    for text in (current["version"], earlier["version"], "tandem quantize", "top-1 0.7500 INT8"):
        assert text in table
    assert "At most 5 earlier versions are kept" in table


def test_the_history_of_a_version_is_that_of_its_set(sets):
    listed = facts(sets)
    for version in (listed[0]["version"], listed[1]["version"]):
        name = f"{sets / 'tiny'}@{version}"
        assert json.loads(tandem("models", "history", name, "--json").stdout)["versions"] == listed
        shown = tandem("models", "history", name).stdout
        assert f"tandem models pin {sets / 'tiny'}@VERSION" in shown


def test_a_version_is_pinned_and_the_other_kept(sets):
    current, earlier = facts(sets)
    result = tandem("models", "pin", f"tiny@{earlier['version']}", "--model-dir", sets)
    assert result.exit_code == 0
    assert f"is version {earlier['version']}" in result.stdout
    now, before = facts(sets)
    assert (now["version"], before["version"]) == (earlier["version"], current["version"])
    assert now["accuracy"] == earlier["accuracy"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tiny", "'tiny' names no version: write tiny@VERSION, with one of tandem models history"),
        ("tiny@0123456789ab", r"not 0123456789ab, which it does not keep .* tandem models history"),
    ],
)
def test_what_is_not_pinned(sets, name, says):
    result = tandem("models", "pin", name, "--model-dir", sets)
    assert isinstance(result.exception, ModelSetError)
    assert re.search(says, result.exception.message)


def test_other_commands_take_a_version(sets):
    current, earlier = facts(sets)
    for version in (current["version"], earlier["version"]):
        result = tandem("models", "verify", f"tiny@{version}", "--model-dir", sets)
        assert result.exit_code == 0
    result = tandem("models", "verify", "tiny@0123456789ab", "--model-dir", sets)
    assert isinstance(result.exception, ModelSetError)
    assert f"is version {current['version']}, not 0123456789ab" in result.exception.message


def test_of_a_bundled_set_there_is_one_version():
    result = tandem("models", "history", "imagenette")
    assert result.exit_code == 0
    assert load_model_set("imagenette").fingerprint() in result.stdout
    assert "comes with the program and is read-only" in result.stdout
    told = json.loads(tandem("models", "history", "imagenette", "--json").stdout)
    assert (told["max_earlier"], len(told["versions"])) == (0, 1)
