"""What replicas load where sets are at URLs: the version that was there at first."""

from pathlib import Path

import pytest

from app.launch.config import ServeConfig, default_config
from app.launch.serve_options import with_usable_paths
from app.main import in_versions
from app.settings import Settings
from models.manifest import read_manifest
from models.model_set import ModelSet
from tests.support.tiny_networks import write_tiny_set

URL = "https://host/sets/tiny"
VERSION = "0123456789ab"


@pytest.fixture
def kept(tmp_path: Path) -> ModelSet:
    """A set in a folder as the cache has it."""
    folder = write_tiny_set(tmp_path / VERSION)
    return ModelSet(folder, read_manifest(folder))


@pytest.mark.parametrize("name", [URL, f"{URL}@{'f' * 12}"])
def test_a_url_becomes_that_of_its_version_and_names_stay(kept: ModelSet, name: str) -> None:
    settings = Settings(model_set=name, weights={"sure": 1.0})
    changed = in_versions(settings, [kept.weighted({"sure": 1.0})])
    assert changed.model_set == f"{URL}@{VERSION}"
    assert changed.model_copy(update={"model_set": name}) == settings
    settings = Settings(model_set="imagenette")
    assert in_versions(settings, [kept]) is settings


def test_of_several_sets_those_at_urls(kept: ModelSet) -> None:
    settings = Settings.model_validate({"model_sets": ["imagenette", URL]})
    found = in_versions(settings, [kept, kept])
    assert found.model_sets == ("imagenette", f"{URL}@{VERSION}")
    assert [own.model_set for own in found.of_each_set()] == list(found.model_sets)


def test_a_url_is_no_folder_to_be_made_absolute() -> None:
    config = ServeConfig.read(default_config()).changed(model_set=URL)
    assert with_usable_paths(config)[0].settings.model_set == URL
