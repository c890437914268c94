"""What all tests of the launch need."""

import signal
from collections.abc import Iterator

import pytest

from tests.support.certificates import Root, Signed


@pytest.fixture(autouse=True)
def hang_up() -> Iterator[None]:
    """Let SIGHUP have its effect, which nohup takes away: tests send it, and look at it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def no_subreaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this process from adopting what other tests leave behind."""
    monkeypatch.setattr("app.launch.supervisor.adopt_orphans", lambda: None)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def signed(root: Root) -> Signed:
    return root.sign("service")
