"""An index of packages on this machine, for pip."""

from collections.abc import Iterator

import pytest

from tests.support.calibration.package_index import PackageIndex


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    with PackageIndex() as served:
        served.set_for_pip(monkeypatch)
        yield served
