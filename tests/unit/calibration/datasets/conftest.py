"""Sets whose classes go by label, or by id too."""

import pytest

from models.model_set import ModelSet
from tests.support.calibration.labelled_files import with_names


@pytest.fixture(scope="module")
def by_label(tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    return with_names(tmp_path_factory.mktemp("sets") / "labels")


@pytest.fixture(scope="module")
def by_id(tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    """Ids sort otherwise than the labels do, so that a mistaken order shows."""
    return with_names(tmp_path_factory.mktemp("sets") / "ids", ids=("n03", "n01", "n02"))
