"""The Combiner on the tiny set: weights of the manifest, labels, agreement."""

import numpy as np
import pytest

from app.errors import OtherSetError
from app.settings import Settings
from app.stages.combiner import Combiner
from calibration.sets.transaction import write_manifest
from models.manifest import read_manifest
from tests.support.plans import planned
from tests.support.tiny_networks import LABELS, write_tiny_set


@pytest.fixture(scope="module")
def combiner(tmp_path_factory) -> Combiner:
    folder = write_tiny_set(tmp_path_factory.mktemp("set"), weights={"sure": 3.0, "unsure": 1.0})
    return Combiner(Settings(model_set=str(folder)))


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


async def test_an_answer_has_weights_labels_and_each_members_own_opinion(combiner):
    (one,) = await combiner.combine({"sure": row(1, 0, 0), "unsure": row(0, 0.4, 0.6)}, 2)
    assert [(p.label, p.index) for p in one.predictions] == [(LABELS[0], 0), (LABELS[2], 2)]
    assert [p.probability for p in one.predictions] == pytest.approx([0.75, 0.15])
    assert [p.label for p in one.members["unsure"]] == [LABELS[2], LABELS[1]]
    assert not one.agreement
    rows = np.eye(3, dtype=np.float32)
    answers = await combiner.combine({"sure": rows, "unsure": rows}, 1)
    assert [a.predictions[0].index for a in answers] == [0, 1, 2]
    assert all(a.agreement for a in answers)
    (one,) = await combiner.combine({"unsure": row(0.2, 0.3, 0.5)}, 3)
    assert one.agreement
    assert sum(p.probability for p in one.predictions) == pytest.approx(1)


async def test_each_average_has_the_temperature_of_its_own(tmp_path):
    folder = write_tiny_set(tmp_path / "set")
    planned(folder, (("sure",), 0.7), (("unsure",), None), temperatures=(0.25, 1.0))
    write_manifest(folder, read_manifest(folder).model_copy(update={"temperature": 0.5}))
    hot = Combiner(Settings(model_set=str(folder)))
    rows = {"sure": row(0.8, 0.1, 0.1), "unsure": row(0.4, 0.3, 0.3)}
    (one,) = await hot.combine(rows, 3)
    assert [p.probability for p in one.predictions] == pytest.approx([9 / 11, 1 / 11, 1 / 11])
    (alone,) = await hot.combine({"sure": rows["sure"]}, 1)
    assert alone.predictions[0].probability == pytest.approx(0.8)
    (first,) = await hot.combine({"sure": rows["sure"]}, 1, step=0)
    assert first.predictions[0].probability == pytest.approx(0.8**4 / (0.8**4 + 2 * 0.1**4))
    (last,) = await hot.combine(rows, 3, step=1)
    assert last.predictions[0].probability == pytest.approx(0.6)


async def test_a_combiner_refuses_members_that_it_does_not_know(tiny_set):
    combiner = Combiner(Settings(model_set=str(tiny_set)))
    with pytest.raises(OtherSetError, match="members here: other; a rolling update is under way"):
        await combiner.combine({"other": np.zeros((1, 3), np.float32)}, 1)
