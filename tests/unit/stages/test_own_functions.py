"""The operator's own functions: import, trial, calls, several inputs, multi-label sets."""

import sys

import numpy as np
import pytest

from app.errors import ConfigError
from app.settings import Settings
from app.stages import own_functions
from app.stages.combiner import Combiner
from models.image import ImageInputs, ImageRule
from models.model_set import load_model_set
from models.own_functions import OwnFunction, WrongAnswerError, load_function, tried_views
from tests.support.cases import cases
from tests.support.scored_sets import write_scored_set

OWN = "tests.support.own_functions"
MANIFEST = load_model_set("imagenette").manifest
INPUTS = ImageInputs({"large": ImageRule(8, 8), "small": ImageRule(4, 4)})
BATCH = np.random.default_rng(3).integers(0, 256, (5, INPUTS.num_bytes), np.uint8)
EXAMPLES = "configs.functions"


def check(tiny_set, **changes):
    settings = Settings(model_set=str(tiny_set), **changes)
    own_functions.check_functions(settings, load_model_set(str(tiny_set)).manifest)


@cases(
    "settings",
    {},
    {"preprocess": f"{OWN}:identity"},
    {"preprocess": f"{OWN}:an_object"},
    {"preprocess": "numpy:negative"},  # in C: it has no signature to look at
    {"preprocess": f"{OWN}:with_negatives", "combine": f"{OWN}:vote"},
    {"combine": f"{OWN}:vote", "answer_policy": "any"},
    {"combine": f"{OWN}:wants_both"},
)
def test_what_fits(tiny_set, settings):
    check(tiny_set, **settings)


@cases(
    "function, says",
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
    (f"{OWN}:many_views", r"7 views of each file: max_files is 448, .* raise max_queued"),
)
def test_a_preprocess_that_does_not_fit(tiny_set, function, says):
    with pytest.raises(ConfigError, match=says) as raised:
        check(tiny_set, preprocess=function)
    assert raised.value.message.startswith("preprocess: ")


@cases(
    "function, policy, says",
    ("identity", "all", "cannot be called with 2 positional arguments"),
    ("three_arguments", "all", "cannot be called with 2 positional arguments"),
    ("one_row", "all", r"float32 \(1, 3\) of sure, unsure, returned float32 \(3,\), not"),
    ("not_a_number", "all", "returned NaN or infinity among the probabilities"),
    ("of_two", "all", "returned a row that sums to 2, not to 1"),
    ("negative", "all", "returned probabilities from -1 to 2, not from 0 to 1"),
    ("double", "all", r"returned float64 \(1, 3\), not float32 \(1, 3\)"),
    ("wants_both", "any", r"\(1, 3\) of sure, raised KeyError: 'unsure'"),
)
def test_a_combine_that_does_not_fit(tiny_set, function, policy, says):
    with pytest.raises(ConfigError, match=says):
        check(tiny_set, combine=f"{OWN}:{function}", answer_policy=policy)


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


def test_a_fast_plan_averages_and_the_trial_counts_the_views(tiny_set):
    with pytest.raises(ValueError, match="leave one of them out"):
        Settings(combine=f"{OWN}:vote", plan="fast")
    Settings(preprocess=f"{OWN}:identity", plan="fast")
    settings = Settings(preprocess=f"{OWN}:with_negatives")
    function = load_function(settings.preprocess, "preprocess")
    assert function is not None
    assert tried_views(function, load_model_set(str(tiny_set)).manifest.inputs) == 2


def test_an_identity_changes_with_name_and_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "own_changing.py"
    found = set()
    for text in ("f = g = lambda a, b: a", "f = g = lambda a, b: b"):
        source.write_text(text)
        sys.modules.pop("own_changing", None)
        for name in ("f", "g"):
            (identity,) = own_functions.identities(
                Settings(combine=f"own_changing:{name}"), MANIFEST
            )
            found.add(identity)
    assert len(found) == 4
    assert own_functions.identities(Settings(), MANIFEST) == ()


def test_a_neighbour_of_the_module_in_its_package_counts_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text("from own_package.other import f")
    settings = Settings(combine="own_package.main:f")
    (package / "other.py").write_text("def f(a, b): return a")
    before = own_functions.identities(settings, MANIFEST)
    (package / "other.py").write_text("def f(a, b): return b")
    assert (
        own_functions.identities(settings, MANIFEST) == before
    )  # of what was imported, which is what runs
    for name in ("own_package", "own_package.main", "own_package.other"):
        del sys.modules[name]
    assert own_functions.identities(settings, MANIFEST) != before


# A function of the operator's where members take different inputs: a call for each of them.


def own(function, num_views: int) -> own_functions.OwnPreprocess:
    calls = own_functions.FunctionCalls(
        OwnFunction("preprocess", "tests:function", function, "0"), 2
    )
    return own_functions.OwnPreprocess(calls, num_views, INPUTS)


@pytest.mark.parametrize("member", ["large", "small"])
async def test_each_input_has_its_views(member):
    def mirrored(images):
        return np.concatenate([images, images[:, :, ::-1]])

    views = await own(mirrored, 2).views(BATCH)
    expected = INPUTS.of(member, BATCH)
    np.testing.assert_array_equal(INPUTS.of(member, views)[:, 0], expected)
    np.testing.assert_array_equal(INPUTS.of(member, views)[:, 1], expected[:, :, ::-1])


async def test_one_view_is_an_image_as_the_decoder_makes_it():
    views = await own(lambda images: 255 - images, 1).views(BATCH)
    np.testing.assert_array_equal(views, 255 - BATCH)


# The operator's own ``combine`` and a multi-label set: scores of each class by itself.


@pytest.fixture(scope="module")
def scored_set(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_scored_set(tmp_path_factory.mktemp("scored")))


def check_multi(folder: str, combine: str) -> None:
    settings = Settings(model_set=folder, combine=combine)
    own_functions.check_functions(settings, load_model_set(folder).manifest)


@pytest.mark.parametrize(
    "combine",
    [f"{EXAMPLES}.geometric_mean:geometric_mean", f"{EXAMPLES}.majority_vote:majority_vote"],
)
def test_a_function_that_shares_one_among_the_classes_is_refused(scored_set, combine):
    with pytest.raises(ConfigError, match=r"every member scores 0\.99 or more.*multi-label"):
        check_multi(scored_set, combine)


async def test_the_highest_score_is_a_combination(scored_set):
    combine = f"{OWN}:highest"
    check_multi(scored_set, combine)
    combiner = Combiner(Settings(model_set=scored_set, combine=combine))
    rows = {"steep": [[0.9, 0.1, 0.2]], "flat": [[0.6, 0.7, 0.3]]}
    members = {name: np.array(row, np.float32) for name, row in rows.items()}
    (answer,) = await combiner.combine(members, 3)
    found = {one.label: one.probability for one in answer.predictions}
    assert found == pytest.approx({"has blue": 0.9, "has green": 0.7})


def test_rows_that_sum_to_more_than_one_are_of_multi_label_sets_alone():
    rows = np.array([[0.9, 0.8, 0.1]], np.float32)
    assert own_functions.as_rows(rows, (1, 3), is_multi_label=True) is rows
    with pytest.raises(WrongAnswerError, match=r"sums to 1\.8, not to 1"):
        own_functions.as_rows(rows, (1, 3))
    with pytest.raises(WrongAnswerError, match="from 0 to 1"):
        own_functions.as_rows(rows * 2, (1, 3), is_multi_label=True)
