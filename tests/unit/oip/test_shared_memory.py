"""Who may use shared memory, and where it is on."""

from pathlib import Path

import pytest

from app.environment import REGIONS_FOLDER
from app.errors import BadRegionError, ConfigError, NotLocalError
from app.oip.shared_memory import SharedMemory, is_loopback, shared_memory_of
from app.settings import Settings
from tests.support.shared_regions import Memory


def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(REGIONS_FOLDER, str(tmp_path))
    memory = shared_memory_of(Settings())
    assert not memory.is_on
    with pytest.raises(BadRegionError, match="shared memory is off here; send the data itself"):
        memory.for_caller(is_local=True)


def test_only_tandem_serve_on_loopback_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(REGIONS_FOLDER, raising=False)
    with pytest.raises(ConfigError, match="is for tandem serve"):
        shared_memory_of(Settings(shared_memory=True))
    monkeypatch.setenv(REGIONS_FOLDER, str(tmp_path))
    memory = shared_memory_of(Settings(shared_memory=True))
    assert memory.is_on
    assert memory.for_caller(is_local=True).status() == []


def test_callers_elsewhere_are_refused(tmp_path: Path) -> None:
    memory = SharedMemory(Memory(tmp_path).regions)
    with pytest.raises(NotLocalError, match="on the service's own machine"):
        memory.for_caller(is_local=False)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("0.0.0.0", False),
        ("fe80::1", False),
        ("localhost", False),
        ("", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_addresses_of_this_machine(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
