"""Whatever clients register and use, in any order: a client's error, or the bytes themselves."""

import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import BadRegionError, RegionExistsError, UnknownRegionError
from app.oip.tensors import RegionSlice
from tests.support.shared_regions import Memory

EXAMPLES = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TOLD = (BadRegionError, UnknownRegionError, RegionExistsError)
NUMBERS = st.integers(0, 70) | st.sampled_from([-1, 2**31, 2**63 - 1, 2**63, 2**70, -(2**63)])
ANY = st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
NAMES = st.sampled_from(["r", "s"])
KEYS = st.sampled_from(["k", "/k", "l", "link", "pipe", "folder", "..", "../entries", "/", "k\0"])
STEPS = st.one_of(
    st.tuples(st.just("register"), NAMES | ANY, KEYS | ANY, NUMBERS | ANY, NUMBERS | ANY),
    st.tuples(st.just("read"), NAMES | st.text(max_size=3), NUMBERS, NUMBERS),
    st.tuples(st.just("write"), NAMES, NUMBERS, NUMBERS),
    st.tuples(st.just("truncate"), st.sampled_from(["k", "l"]), st.integers(0, 100)),
    st.tuples(st.just("unlink"), st.sampled_from(["k", "l"])),
    st.tuples(st.just("unregister"), NAMES | st.just("")),
)


class Run:
    """Takes steps, and knows what must be there."""

    def __init__(self, folder: Path) -> None:
        self._memory = Memory(folder)
        self._secret = self._memory.entries.parent / "secret"
        self._secret.write_bytes(b"nobody's")
        for key in ("k", "l"):
            self._memory.file(key, bytes(range(64)))
        (self._memory.folder / "link").symlink_to(self._secret)
        (self._memory.folder / "folder").mkdir()
        os.mkfifo(self._memory.folder / "pipe")

    def take(self, step: tuple[Any, ...]) -> None:
        verb, *rest = step
        refused = None
        try:
            getattr(self, f"_{verb}")(*rest)
        except TOLD as error:
            refused = error
        assert refused is None or 0 < len(refused.message) < 600
        assert self._secret.read_bytes() == b"nobody's"

    def _register(self, *given: Any) -> None:
        self._memory.regions.register(*given)
        assert given[0] in [one.name for one in self._memory.regions.status()]

    def _read(self, name: str, byte_size: int, offset: int) -> None:
        found = self._memory.regions.read(RegionSlice(name, byte_size, offset))
        assert len(found) == byte_size

    def _write(self, name: str, byte_size: int, offset: int) -> None:
        part = RegionSlice(name, byte_size, offset)
        self._memory.regions.write(part, bytes(max(0, min(byte_size, 8))))

    def _truncate(self, key: str, size: int) -> None:
        if (place := self._memory.folder / key).exists():
            os.truncate(place, size)

    def _unlink(self, key: str) -> None:
        (self._memory.folder / key).unlink(missing_ok=True)

    def _unregister(self, name: str) -> None:
        self._memory.regions.unregister(name)


@EXAMPLES
@given(st.lists(STEPS, max_size=12))
def test_any_steps_in_any_order(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        for step in steps:
            run.take(step)
