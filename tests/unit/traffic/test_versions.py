"""Versions that share the traffic: of one set and one list of classes, each by its own name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.errors import ConfigError, UnverifiedError
from app.main import in_versions
from app.settings import Settings
from app.traffic.plan import Split
from app.traffic.versions import (
    accuracy_warnings,
    class_places,
    first_split,
    loaded_sets,
    refused_by_gate,
)
from calibration.sets.durable import write_manifest
from models.manifest import read_manifest
from models.record import FileRecord
from tests.support.tiny_networks import LABELS, with_accuracy, write_tiny_set
from tests.support.tiny_versions import GOOD, SURER, name_of, write_versions


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    return write_versions(tmp_path / "tiny", GOOD, SURER)


def settings_of(**more: object) -> Settings:
    return Settings.model_validate({"compile_cache": None} | more)


def set_with_labels(folder: Path, *labels: str, **more: Any) -> str:
    folder.mkdir()
    (folder / "names.txt").write_text("\n".join(labels) + "\n", "utf-8")
    record = FileRecord.of(folder, "names.txt")
    return str(write_tiny_set(folder, labels=record, num_classes=len(labels), **more))


def set_with_ids(folder: Path, ids: str, labels: Sequence[str]) -> str:
    folder.mkdir()
    (folder / "ids.txt").write_text(ids.replace(" ", "\n") + "\n", "utf-8")
    (folder / "names.txt").write_text("\n".join(labels) + "\n", "utf-8")
    records = {name: FileRecord.of(folder, f"{name}.txt") for name in ("names", "ids")}
    return str(write_tiny_set(folder, labels=records["names"], class_ids=records["ids"]))


def test_the_settings_make_the_first_split(names: list[str]) -> None:
    good, better = names
    settings = settings_of(traffic={better: 5, good: 95})
    sets = loaded_sets(settings)
    assert settings.model_set == good
    assert [model_set.fingerprint() for model_set in sets] == [good[-12:], better[-12:]]
    assert first_split(settings, sets) == Split({name_of(good): 95.0, name_of(better): 5.0})
    shadowed = settings_of(model_set=good, shadow=better)
    split = first_split(shadowed, loaded_sets(shadowed))
    assert split == Split({name_of(good): 100.0, name_of(better): 0.0}, name_of(better))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traffic": {"a@111111111111": 95}}, "sum to 95, not to 100"),
        ({"traffic": {"a": 100}, "model_set": "b"}, "model_set is 'b', and traffic is of 'a'"),
        ({"traffic": {"a": 100}, "members": "deployment"}, "members is deployment"),
        ({"shadow": "a", "model_sets": ["a", "b"]}, "versions of one set"),
        ({"traffic": {"a": 100}, "model_sets": ["a", "b"]}, "versions of one set"),
        ({"shadow": "a", "weights": {"x": 1}}, "leave out model_sets and weights"),
        ({"traffic_header": "X-User"}, "traffic_header"),
        ({"compare_ratio": 1.5}, "compare_ratio"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings_of(**changes)


def test_a_set_may_be_named_with_its_traffic() -> None:
    settings = settings_of(model_set="a", traffic={"a@111111111111": 40, "a@222222222222": 60})
    assert settings.model_set == "a@222222222222"


def test_the_same_version_twice_is_refused(names: list[str]) -> None:
    good, _ = names
    folder, _, _ = good.rpartition("@")
    with pytest.raises(ConfigError, match=f"name {name_of(good)} twice"):
        loaded_sets(settings_of(model_set=folder, shadow=good))


def test_versions_of_two_sets_are_refused(tmp_path: Path, names: list[str]) -> None:
    other = str(write_tiny_set(tmp_path / "other", name="other"))
    with pytest.raises(ConfigError, match="tiny and other are two sets"):
        loaded_sets(settings_of(model_set=names[0], shadow=other))


def test_other_classes_are_refused_with_their_names(tmp_path: Path, names: list[str]) -> None:
    other = set_with_labels(tmp_path / "other", "mostly blue", "mostly green", "mostly pink")
    with pytest.raises(ConfigError, match="mostly red are missing, mostly pink are new"):
        loaded_sets(settings_of(model_set=names[0], shadow=other))


def test_the_same_classes_in_another_order_are_mapped(tmp_path: Path, names: list[str]) -> None:
    other = set_with_labels(tmp_path / "other", *LABELS[1:], LABELS[0])
    main, shadow = loaded_sets(settings_of(model_set=names[0], shadow=other))
    assert class_places(main, shadow) == [2, 0, 1]
    assert class_places(main, main) is None


def test_two_classes_of_one_name_in_another_order_cannot_be_mapped(tmp_path: Path) -> None:
    first = set_with_labels(tmp_path / "first", "crane", "crane", "heron")
    other = set_with_labels(tmp_path / "other", "heron", "crane", "crane")
    with pytest.raises(ConfigError, match="several classes are called crane: give both sets class"):
        loaded_sets(settings_of(model_set=first, shadow=other))


def test_ids_in_another_order_are_mapped_and_other_ids_are_refused(tmp_path: Path) -> None:
    first, moved, other = (
        set_with_ids(tmp_path / name, ids, labels)
        for name, ids, labels in (
            ("first", "b g r", LABELS),
            ("moved", "r b g", ("scarlet", "azure", "emerald")),
            ("other", "r b x", LABELS),
        )
    )
    main, shadow = loaded_sets(settings_of(model_set=first, shadow=moved))
    assert class_places(main, shadow) == [1, 2, 0]
    message = "other class ids than .*: g are missing, x are new; make the version with the same cl"
    with pytest.raises(ConfigError, match=message):
        loaded_sets(settings_of(model_set=first, shadow=other))
    shares = {first: 50.0, moved: 40.0, other: 10.0}
    with pytest.raises(ConfigError, match="g are missing"):
        loaded_sets(settings_of(traffic=shares))


def test_classes_of_the_same_ids_may_have_better_labels(tmp_path: Path) -> None:
    first = set_with_ids(tmp_path / "first", "b g r", LABELS)
    second = set_with_ids(tmp_path / "second", "b g r", ("blue", "green", "red"))
    assert class_places(*loaded_sets(settings_of(model_set=first, shadow=second))) is None


def test_a_version_that_lost_too_much_may_be_a_shadow(names: list[str]) -> None:
    good, better = names
    folder = Path(good.rpartition("@")[0]) / ".versions" / better[-12:]
    lost = with_accuracy(read_manifest(folder), {"sure": 0.5, "ensemble": 0.5}, {"ensemble": 0.4})
    write_manifest(folder, lost)
    shadowed = settings_of(model_set=good, shadow=better)
    warnings = accuracy_warnings(shadowed, loaded_sets(shadowed))
    assert any("40" in warning for warning in warnings)
    dropped = loaded_sets(shadowed)[1]
    assert refused_by_gate(dropped, shadowed) is not None
    assert refused_by_gate(dropped, settings_of(model_set=good, allow_unverified=True)) is None
    answering = settings_of(traffic={good: 95, better: 5})
    with pytest.raises(UnverifiedError):
        accuracy_warnings(answering, loaded_sets(answering))


def test_every_replica_has_the_versions_that_urls_have_now(names: list[str]) -> None:
    sets = loaded_sets(settings_of(model_set=names[0], shadow=names[1]))
    url = "https://store/tiny"
    settings = settings_of(model_set=url, traffic={url: 95, f"{url}@{names[1][-12:]}": 5})
    named = in_versions(settings, sets)
    hashes = [f"{url}@{model_set.folder.name}" for model_set in sets]
    assert list(named.traffic or ()) == hashes
    assert named.model_set == hashes[0]
