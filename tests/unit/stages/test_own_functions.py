"""The operator's functions before anything is served: found, tried, or refused with a reason."""

import sys
from typing import Any

import pytest

from app.errors import ConfigError
from app.settings import Settings
from app.stages.own_functions import check_functions, identities, load_function, try_preprocess
from models.model_set import load_model_set

OWN = "tests.support.own_functions"


def check(tiny_set, **changes: Any) -> None:
    settings = Settings(model_set=str(tiny_set), **changes)
    check_functions(settings, load_model_set(str(tiny_set)).manifest)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preprocess": f"{OWN}:identity"},
        {"preprocess": f"{OWN}:an_object"},
        {"preprocess": "numpy:negative"},  # in C: it has no signature to look at
        {"preprocess": f"{OWN}:with_negatives", "combine": f"{OWN}:vote"},
        {"combine": f"{OWN}:vote", "answer_policy": "any"},
        {"combine": f"{OWN}:wants_both"},
    ],
)
def test_what_fits(tiny_set, settings):
    check(tiny_set, **settings)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("no_such_module:f", "there is no module no_such_module; install it, or put its folder on"),
        ("tests.no_such:f", "there is no module tests.no_such; install it"),
        (f"{OWN}:no_such", "own_functions has no no_such"),
        (f"{OWN}:TRIED", "is no function but a int"),
        (f"{OWN}:vote", r"cannot be called with 1 positional argument \(missing a required"),
        (f"{OWN}:asynchronous", "is asynchronous: give a plain function"),
        (f"{OWN}:fewer", r"tried on uint8 \(1, 16, 16, 3\), returned uint8 \(0, 16, 16, 3\), not "),
        (f"{OWN}:smaller", r"returned uint8 \(1, 8, 8, 3\), not uint8 \(V \* 1, 16, 16, 3\)"),
        (f"{OWN}:as_float", r"returned float32 \(1, 16, 16, 3\), not uint8"),
        (f"{OWN}:nothing", "returned None, not uint8"),
        (f"{OWN}:writes", "raised ValueError: assignment destination is read-only"),
        (f"{OWN}:leaves", "raised SystemExit: 3"),
        (f"{OWN}:too_many_views", "returned 9 views of each image; the limit is 8"),
        (f"{OWN}:views_as_it_likes", r"\(6, 16, 16, 3\), not uint8 \(1 \* 3, 16, 16, 3\)"),
        (
            f"{OWN}:many_views",
            r"7 views of each file: max_files is 448, .* raise max_queued",
        ),
    ],
)
def test_a_preprocess_that_does_not_fit(tiny_set, function, says):
    with pytest.raises(ConfigError, match=says) as raised:
        check(tiny_set, preprocess=function)
    assert raised.value.message.startswith("preprocess: ")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (f"{OWN}:identity", "cannot be called with 2 positional arguments"),
        (f"{OWN}:three_arguments", "cannot be called with 2 positional arguments"),
        (f"{OWN}:one_row", r"float32 \(1, 3\) of sure, unsure, returned float32 \(3,\), not"),
        (f"{OWN}:not_a_number", "returned NaN or infinity among the probabilities"),
        (f"{OWN}:of_two", "returned a row that sums to 2, not to 1"),
        (f"{OWN}:negative", "returned probabilities from -1 to 2, not from 0 to 1"),
        (f"{OWN}:double", r"returned float64 \(1, 3\), not float32 \(1, 3\)"),
    ],
)
def test_a_combine_that_does_not_fit(tiny_set, function, says):
    with pytest.raises(ConfigError, match=says):
        check(tiny_set, combine=function)


def test_a_combine_must_take_as_few_members_as_may_answer(tiny_set):
    with pytest.raises(ConfigError, match=r"\(1, 3\) of sure, raised KeyError: 'unsure'"):
        check(tiny_set, combine=f"{OWN}:wants_both", answer_policy="any")


@pytest.mark.parametrize("body", ["raise RuntimeError('at import')", "exit(3)", "import nowhere_"])
def test_a_module_that_fails_when_it_is_imported(tiny_set, tmp_path, monkeypatch, body):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_failing.py").write_text(body)
    with pytest.raises(ConfigError, match="importing it raised") as raised:
        check(tiny_set, combine="own_failing:f")
    assert "combine: own_failing:f" in raised.value.message


@pytest.mark.parametrize("name", ["", "a", "a:", ":f", "a..b:f", "a:b.c", "a b:f", "/x:f"])
def test_a_name_is_of_a_module_and_a_function(name):
    with pytest.raises(ValueError, match=r"give package\.module:function"):
        Settings(preprocess=name)


def test_a_cascade_averages():
    with pytest.raises(ValueError, match="leave one of them out"):
        Settings(combine=f"{OWN}:vote", cascade_margin=0.5)
    Settings(preprocess=f"{OWN}:identity", cascade_margin=0.5)


def test_the_trial_counts_the_views(tiny_set):
    settings = Settings(preprocess=f"{OWN}:with_negatives")
    function = load_function(settings.preprocess, "preprocess")
    assert function is not None
    assert try_preprocess(function, load_model_set(str(tiny_set)).manifest, 1, 64) == 2


def test_an_identity_changes_with_name_and_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "own_changing.py"
    found = set()
    for text in ("f = g = lambda a, b: a", "f = g = lambda a, b: b"):
        source.write_text(text)
        sys.modules.pop("own_changing", None)
        for name in ("f", "g"):
            (identity,) = identities(Settings(combine=f"own_changing:{name}"))
            found.add(identity)
    assert len(found) == 4
    assert identities(Settings()) == ()


def test_a_neighbour_of_the_module_in_its_package_counts_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text("from own_package.other import f")
    settings = Settings(combine="own_package.main:f")
    (package / "other.py").write_text("def f(a, b): return a")
    before = identities(settings)
    (package / "other.py").write_text("def f(a, b): return b")
    assert identities(settings) == before  # of what was imported, which is what runs
    for name in ("own_package", "own_package.main", "own_package.other"):
        del sys.modules[name]
    assert identities(settings) != before
