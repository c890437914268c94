"""The operator's own ``combine`` and a multi-label set: scores of each class by itself."""

import numpy as np
import pytest

from app.errors import ConfigError
from app.settings import Settings
from app.stages.combiner import Combiner
from app.stages.own_functions import WrongAnswerError, as_rows, check_functions
from models.model_set import load_model_set
from tests.support.scored_sets import write_scored_set

OWN = "tests.support.own_functions"
EXAMPLES = "configs.functions"


@pytest.fixture(scope="module")
def scored_set(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_scored_set(tmp_path_factory.mktemp("scored")))


def check(folder: str, combine: str) -> None:
    settings = Settings(model_set=folder, combine=combine)
    check_functions(settings, load_model_set(folder).manifest)


@pytest.mark.parametrize(
    "combine",
    [f"{EXAMPLES}.geometric_mean:geometric_mean", f"{EXAMPLES}.majority_vote:majority_vote"],
)
def test_a_function_that_shares_one_among_the_classes_is_refused(scored_set, combine):
    with pytest.raises(ConfigError, match=r"every member scores 0\.99 or more.*multi-label"):
        check(scored_set, combine)


async def test_the_highest_score_is_a_combination(scored_set):
    combine = f"{OWN}:highest"
    check(scored_set, combine)
    combiner = Combiner(Settings(model_set=scored_set, combine=combine))
    rows = {"steep": [[0.9, 0.1, 0.2]], "flat": [[0.6, 0.7, 0.3]]}
    members = {name: np.array(row, np.float32) for name, row in rows.items()}
    (answer,) = await combiner.combine(members, 3)
    found = {one.label: one.probability for one in answer.predictions}
    assert found == pytest.approx({"has blue": 0.9, "has green": 0.7})


def test_rows_that_sum_to_more_than_one_are_of_multi_label_sets_alone():
    rows = np.array([[0.9, 0.8, 0.1]], np.float32)
    assert as_rows(rows, (1, 3), is_multi_label=True) is rows
    with pytest.raises(WrongAnswerError, match=r"sums to 1\.8, not to 1"):
        as_rows(rows, (1, 3))
    with pytest.raises(WrongAnswerError, match="from 0 to 1"):
        as_rows(rows * 2, (1, 3), is_multi_label=True)
