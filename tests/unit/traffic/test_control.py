"""The gate of promote: refusals with figures, and which version is meant.

Versions that share the traffic: of one set and one list of classes, each by its own name.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from app.errors import BadParameterError, ConfigError, UnverifiedError
from app.graph.served_models import refused_by_gate
from app.main import in_versions
from app.settings import Settings
from app.traffic.control import (
    accuracy_warnings,
    candidate,
    class_places,
    first_split,
    loaded_sets,
    refusals,
    status_of,
)
from app.traffic.plan import (
    BookStatus,
    Comparison,
    Disagreement,
    Figures,
    Plan,
    Split,
    VersionFigures,
)
from calibration.sets.transaction import write_manifest
from models.manifest import read_manifest
from models.record import FileRecord
from tests.support.cases import cases
from tests.support.plain_values import plain
from tests.support.tiny_networks import LABELS, with_accuracy, write_tiny_set
from tests.support.tiny_versions import GOOD, SURER, name_of, write_versions

A, B, C = "imagenet@aaaaaaaaaaaa", "imagenet@bbbbbbbbbbbb", "imagenet@cccccccccccc"


def status(
    num_agreed: int = 0,
    num_differing: int = 0,
    split: Split = Split({A: 95.0, B: 5.0}),  # noqa: B008  # frozen
    refused: str | None = None,
    figures: VersionFigures | None = None,
    **others: str | None,
) -> dict[str, Any]:
    comparison = Comparison()
    for _ in range(num_agreed):
        comparison.note(0.0, None)
    for _ in range(num_differing):
        comparison.note(1.0, Disagreement("r", 0, ["cat", "dog"]))
    pairs = {f"{A} {B}": comparison} if comparison.compared else {}
    book = BookStatus(Plan.first(split), [0], Figures({B: figures} if figures else {}, pairs))
    return plain(status_of(book, {A: None, B: refused} | others))


def failed(num: int) -> dict[str, Any]:
    return {"figures": VersionFigures(copies_failed=num)}


def answers(num: int, num_failed: int) -> dict[str, Any]:
    return {"figures": VersionFigures(num, num_failed)}


@cases(
    "counts, more, reason",
    ((200,), {}, None),
    ((995, 5), {}, None),
    ((150,), {}, f"150 photos were compared with {A}, 50 fewer than 200*"),
    ((), {}, f"0 photos were compared with {A}, 200 fewer than 200*"),
    ((600, 400), {}, f"*agrees with {A} on 600 of 1000 photos, 60.0% (95 %: from 56.9%)*"),
    ((600, 400), {}, "*38.1% below 95.0%*"),
    # Nine of ten copies fail, and the version agrees on all that it answered.
    ((200,), failed(1800), f"*{A} on 200 of 200 photos and 1800 that it failed on, 10.0%*"),
    ((2000,), failed(3), None),
    ((200,), answers(98, 2), "2 of its 100 answers to clients failed, 2.0%: more than 1.0%*"),
    ((200,), answers(99, 1), None),
    ((1000,), {"refused": "INT8 lost 3 %"}, "INT8 lost 3 %"),
)
def test_a_version_is_promoted_or_refused_with_the_figures(counts, more, reason) -> None:
    reasons = refusals(status(*counts, **more), B, 200, 0.95)
    assert len(reasons) == (reason is not None)
    assert all(fnmatchcase(text, reason) for text in reasons), reasons


def test_copies_that_all_failed_are_refused_beside_too_few() -> None:
    _, reason = refusals(status(**failed(50)), B, 200, 0.95)
    assert f"agrees with {A} on 0 of 0 photos and 50 that it failed on, 0.0%" in reason


def test_the_main_version_needs_no_comparison_with_itself() -> None:
    assert refusals(status(), A, 200, 0.95) == []


def test_the_only_other_version_is_meant() -> None:
    loaded: dict[str, Any] = {C: None}
    assert candidate(status(), None) == B
    assert candidate(status(split=Split({A: 100.0}, B)), None) == B
    assert candidate(status(**loaded), None) == B  # C is loaded, and has no part in the traffic
    assert candidate(status(), A) == A


@cases(
    "split, asked, message",
    (Split({A: 90.0, B: 5.0, C: 5.0}), None, f"there are {B}, {C}"),
    (Split({A: 100.0}), None, f"there are {B}"),
    (Split({A: 100.0}), A, "answers every request already"),
    (Split({A: 100.0}), C, f"{C} is not loaded; there are {A}, {B}"),
)
def test_a_version_that_cannot_be_meant_is_refused(split, asked, message):
    others: dict[str, Any] = {C: None} if C in split.shares else {}
    with pytest.raises(BadParameterError, match=message):
        candidate(status(split=split, **others), asked)


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    return write_versions(tmp_path / "tiny", GOOD, SURER)


def settings_of(**more: object) -> Settings:
    return Settings.model_validate({"compile_cache": None} | more)


def set_of(folder: Path, labels: Sequence[str], ids: str = "") -> str:
    folder.mkdir()
    texts = {"names": "\n".join(labels) + "\n", "ids": ids.replace(" ", "\n") + "\n"}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, "utf-8")
    names, codes = (FileRecord.of(folder, f"{name}.txt") for name in texts)
    return str(write_tiny_set(folder, labels=names, class_ids=codes if ids else None))


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


@cases(
    "changes, message",
    ({"traffic": {"a@111111111111": 95}}, "sum to 95, not to 100"),
    ({"traffic": {"a": 100}, "model_set": "b"}, "model_set is 'b', and traffic is of 'a'"),
    ({"traffic": {"a": 100}, "members": "deployment"}, "members is deployment"),
    ({"shadow": "a", "model_sets": ["a", "b"]}, "versions of one set"),
    ({"traffic": {"a": 100}, "model_sets": ["a", "b"]}, "versions of one set"),
    ({"shadow": "a", "weights": {"x": 1}}, "leave out model_sets and weights"),
    ({"traffic_header": "X-User"}, "traffic_header"),
    ({"compare_ratio": 1.5}, "compare_ratio"),
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


IN_ORDER, IDS = (LABELS,), "b g r"


@cases(
    "first, other, expected",
    (IN_ORDER, ([*LABELS[1:], LABELS[0]],), [2, 0, 1]),
    ((LABELS, IDS), (("scarlet", "azure", "emerald"), "r b g"), [1, 2, 0]),
    ((LABELS, IDS), (("blue", "green", "red"), IDS), None),  # better labels
    (IN_ORDER, ([*LABELS[:2], "mostly pink"],), "mostly red are missing, mostly pink are new"),
    (
        (["crane", "crane", "heron"],),
        (["heron", "crane", "crane"],),
        "several classes are called crane: give both sets class",
    ),
    (
        (LABELS, IDS),
        (LABELS, "r b x"),
        "class ids than .*: g are missing, x are new; make the version with the same cl",
    ),
)
def test_classes_in_another_order_are_mapped_and_others_refused(tmp_path, first, other, expected):
    main, shadow = (set_of(tmp_path / n, *of) for n, of in (("a", first), ("b", other)))
    settings = settings_of(model_set=main, shadow=shadow)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            loaded_sets(settings)
    else:
        sets = loaded_sets(settings)
        assert class_places(*sets) == expected
        assert class_places(sets[0], sets[0]) is None


def test_each_version_is_compared_with_all_others(tmp_path: Path) -> None:
    ids = {"first": IDS, "moved": "r b g", "other": "r b x"}
    first, moved, other = (set_of(tmp_path / name, LABELS, ids[name]) for name in ids)
    with pytest.raises(ConfigError, match="g are missing"):
        loaded_sets(settings_of(traffic={first: 50.0, moved: 40.0, other: 10.0}))


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
