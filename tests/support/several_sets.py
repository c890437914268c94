"""Two tiny sets for one service: of other labels, input sizes and members, some named alike."""

from collections.abc import Mapping
from pathlib import Path

from app.settings import Settings
from models.record import FileRecord
from tests.support.tiny_networks import COLORS, LABELS, SIZE, write_tiny_set

FIRST, SECOND = "tiny", "other"
THIRD = "third"  # of three_sets: in model_dirs, and not among model_sets
OTHER_LABELS = ("cold", "fresh", "warm")
OTHER_SIZE = 2 * SIZE


def write_two_sets(folder: Path) -> tuple[str, str]:
    """Write both and return their folders' paths, the default's first."""
    first = write_tiny_set(folder / FIRST)
    place = folder / SECOND
    place.mkdir()
    (place / "names.txt").write_text("\n".join(OTHER_LABELS) + "\n", "utf-8")
    second = write_tiny_set(
        place,
        gains={"sure": 9.0},
        size=OTHER_SIZE,
        name=SECOND,
        labels=FileRecord.of(place, "names.txt"),
    )
    return str(first), str(second)


def labels_of(color: str) -> Mapping[str, str]:
    """Return what each set calls a picture of one colour."""
    index = list(COLORS).index(color)
    return {FIRST: LABELS[index], SECOND: OTHER_LABELS[index]}


def three_sets(folder: Path) -> Settings:
    """Write both, and a third one that can be loaded; return the settings of a service of them."""
    write_tiny_set(folder / "more" / THIRD, name=THIRD)
    return Settings(
        model_sets=write_two_sets(folder),
        model_dirs=(folder / "more",),
        compile_cache=None,
        unload_after_s=60,
    )
