"""Power from a powercap folder as the kernel has it."""

from pathlib import Path

import pytest

from calibration.ladder.power import PackagePower
from tests.support.hand_clock import HandClock


def zone(folder: Path, name: str, kind: str, energy: int, largest: int = 10_000_000) -> Path:
    place = folder / name
    place.mkdir()
    (place / "name").write_text(f"{kind}\n")
    (place / "energy_uj").write_text(f"{energy}\n")
    (place / "max_energy_range_uj").write_text(f"{largest}\n")
    return place


def test_watts_are_joules_over_seconds(tmp_path: Path) -> None:
    clock = HandClock()
    places = [zone(tmp_path, f"intel-rapl:{i}", f"package-{i}", 5) for i in range(2)]
    power = PackagePower(tmp_path, clock)
    clock.now += 2
    for i, place in enumerate(places):
        (place / "energy_uj").write_text(str(5 + 3_000_000 * (i + 1)))
    assert power.watts() == pytest.approx({"package-0": 1.5, "package-1": 3.0})


def test_the_counter_starts_again_after_its_largest(tmp_path: Path) -> None:
    clock = HandClock()
    place = zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000, largest=10_000_000)
    power = PackagePower(tmp_path, clock)
    clock.now += 1
    (place / "energy_uj").write_text("1000000")
    assert power.watts() == pytest.approx({"package-0": 2.0})


def test_parts_of_a_package_and_the_platform_do_not_count_twice(tmp_path: Path) -> None:
    clock = HandClock()
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    zone(tmp_path, "intel-rapl:0:0", "core", 0)
    zone(tmp_path, "intel-rapl:1", "psys", 0)
    power = PackagePower(tmp_path, clock)
    clock.now += 1
    assert power.watts() == {"package-0": 0.0}


def test_no_rapl_no_figure(tmp_path: Path) -> None:
    assert PackagePower(tmp_path / "nothing").watts() == {}


def test_what_only_root_may_read_is_absent(tmp_path: Path, monkeypatch) -> None:
    clock = HandClock()
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    read = Path.read_text

    def refuse(file: Path, *args: str) -> str:
        if file.name == "energy_uj":  # as root, which tests may be, a mode forbids nothing
            raise PermissionError(13, "Permission denied", str(file))
        return read(file, *args)

    monkeypatch.setattr(Path, "read_text", refuse)
    power = PackagePower(tmp_path, clock)
    clock.now += 1
    assert power.watts() == {}


def test_nonsense_is_absent(tmp_path: Path) -> None:
    clock = HandClock()
    place = zone(tmp_path, "intel-rapl:0", "package-0", 9)
    (place / "max_energy_range_uj").write_text("")
    power = PackagePower(tmp_path, clock)
    clock.now += 1
    (place / "energy_uj").write_text("3")
    assert power.watts() == {}
