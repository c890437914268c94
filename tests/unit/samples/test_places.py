"""Folders and stores of samples: bounded, whole, and nobody else's files touched."""

import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.samples.places import SampleFolder, SamplePlace, SampleStore, check_sample_store
from app.samples.sample import Sample, sample_of
from app.samples.sampler import Sampler, disagreement_sampler_of, sampler_of
from app.settings import Settings
from models.store_files import CLIENTS, StoreError, smart_open_file
from tests.support.answers import answer_of
from tests.support.full_disk import full_disk
from tests.support.s3_server import local_s3

# Google's client, where the extra gcs is installed, says so of a package that it can do without.
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")

START = datetime(2026, 11, 26, tzinfo=UTC)
KIB = 1024


def sample(number: int, size: int = KIB) -> Sample:
    """The ``number``-th sample, of about ``size`` bytes, its answer among them."""
    return sample_of(b"\xff\xd8\xff" * (size // 3), answer_of(), 0, START + timedelta(0, number))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def place_of(sampler: Sampler | None) -> SamplePlace:
    assert sampler is not None
    return sampler._place


def test_the_oldest_go_and_the_bound_holds(tmp_path: Path) -> None:
    place, most = SampleFolder(tmp_path, 64 * KIB), 64 * KIB
    for number in range(200):
        assert place.write(sample(number))
        assert num_bytes(tmp_path) <= most
    stems = [sample(number).stem for number in range(200)]
    left = sorted({name.partition(".")[0] for name in names(tmp_path)})
    assert left == stems[-len(left) :]  # the newest, without gaps
    assert len(names(tmp_path)) == 2 * len(left)  # each with its answer
    assert num_bytes(tmp_path) > most // 2


def test_what_others_wrote_counts_and_what_is_no_sample_stays(tmp_path: Path) -> None:
    own = tmp_path / "holiday.jpg"
    own.write_bytes(b"mine" * 50 * KIB)
    for number in range(40):
        SampleFolder(tmp_path, 64 * KIB).write(sample(number))  # a process each
    assert own.exists()
    assert num_bytes(tmp_path) - own.stat().st_size <= 64 * KIB
    assert f"{sample(39).stem}.json" in names(tmp_path)


def test_several_gateways_on_a_folder_hardly_pass_the_bound(tmp_path: Path) -> None:
    most = 1024 * KIB
    places = [SampleFolder(tmp_path, most) for _ in range(4)]
    for number in range(500):
        places[number % 4].write(sample(number, 4 * KIB))
        if number > 280 and number % 7 == 0:
            assert num_bytes(tmp_path) <= most * (1 + 3 / 128)


def test_what_a_killed_process_left_goes_too(tmp_path: Path) -> None:
    partial = tmp_path / f".{sample(0).stem}.jpg.4711.partial"
    partial.write_bytes(b"half" * 4 * KIB)
    place = SampleFolder(tmp_path, 16 * KIB)
    assert place.write(sample(1))
    assert not partial.exists()


def test_a_sample_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    place = SampleFolder(tmp_path, 16 * KIB)
    assert place.write(sample(0))
    assert not place.write(sample(1, 17 * KIB))
    assert len(names(tmp_path)) == 2


def test_a_new_folder_is_its_owners_alone(tmp_path: Path) -> None:
    SampleFolder(tmp_path / "a" / "samples", 16 * KIB).write(sample(0))
    assert stat.S_IMODE((tmp_path / "a" / "samples").stat().st_mode) == 0o700


def test_samples_in_a_folder_of_all_are_their_owners_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    SampleFolder(tmp_path, 16 * KIB).write(sample(0))
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_folder_that_went_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    place = SampleFolder(folder, KIB * KIB)
    place.write(sample(0))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        place.write(sample(1))
    assert place.write(sample(2))


def test_a_full_disk_leaves_no_half_of_a_sample(tmp_path: Path) -> None:
    place = SampleFolder(tmp_path / "samples", KIB * KIB)
    with full_disk(20 * KIB), pytest.raises(OSError, match="large"):
        place.write(sample(0, 64 * KIB))
    assert names(tmp_path / "samples") == []


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with local_s3(monkeypatch) as bucket:
        yield f"{bucket}/samples"


def test_a_store_has_a_folder_a_day_and_a_bound_for_it(s3: str) -> None:
    day = [START]
    place = SampleStore(s3, 4 * KIB, now=lambda: day[0])
    assert [place.write(sample(number)) for number in range(4)] == [True, True, False, False]
    day[0] += timedelta(1)
    last = sample(4)
    assert place.write(last)
    for name, content in last.files:
        with smart_open_file(f"{s3}/20261127/{name}", "rb") as opened:
            assert opened.read() == content


def test_a_store_that_is_gone_says_so(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SampleStore("s3://no-such-bucket-of-mine/samples", KIB * KIB)
    with pytest.raises(StoreError, match="cannot write s3://no-such-bucket-of-mine/samples/"):
        place.write(sample(0))


def test_the_settings_say_where(tmp_path: Path) -> None:
    assert sampler_of(Settings()) is None
    assert sampler_of(Settings(sample_dir=str(tmp_path))) is None  # the ratio is 0
    folder = sampler_of(Settings(sample_dir=str(tmp_path), sample_ratio=0.5))
    assert isinstance(place_of(folder), SampleFolder)
    store = sampler_of(Settings(sample_dir="s3://b/f", sample_ratio=1))
    assert isinstance(place_of(store), SampleStore)
    assert list(tmp_path.iterdir()) == []  # nothing before the first sample


def test_samples_and_disagreements_share_the_bound(tmp_path: Path) -> None:
    versions = {"shadow": "imagenette@000000000000", "sample_mib": 1}
    assert disagreement_sampler_of(Settings(**versions)) is None
    one = Settings(sample_dir=str(tmp_path), sample_ratio=1)
    assert disagreement_sampler_of(one) is None  # of one version
    settings = Settings(sample_dir=str(tmp_path), sample_ratio=1, **versions)
    places = place_of(sampler_of(settings)), place_of(disagreement_sampler_of(settings))
    for number in range(300):
        for place in places:
            assert place.write(sample(number, 4 * KIB))
    below = tmp_path / "disagreements"
    of_disagreements = num_bytes(below)
    of_samples = sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file())
    assert KIB * KIB / 8 < of_disagreements <= KIB * KIB / 4
    assert KIB * KIB / 2 < of_samples <= KIB * KIB * 3 / 4


def test_disagreements_go_to_a_folder_of_the_store(s3: str) -> None:
    settings = Settings(sample_dir=f"{s3}/", shadow="imagenette@000000000000")
    place = place_of(disagreement_sampler_of(settings))
    assert isinstance(place, SampleStore)
    last = sample(1)
    assert place.write(last)
    name, content = last.files[0]
    day = f"{datetime.now(UTC):%Y%m%d}"
    with smart_open_file(f"{s3}/disagreements/{day}/{name}", "rb") as opened:
        assert opened.read() == content


def test_a_store_without_its_package_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("/var/samples", None, "s3://b/samples", "gs://b/samples", "az://c/samples"):
        check_sample_store(place)
    monkeypatch.setitem(CLIENTS, "s3", "no-such-distribution")  # smart_open itself is Ray's
    with pytest.raises(ConfigError, match=r"pip install 'tandem-serve\[s3\]'"):
        check_sample_store("s3://b/samples")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample_ratio": 0.1}, "sample_dir is not set: set it to a folder or a URL"),
        ({"sample_dir": "https://host/f"}, "sample_dir is a 'https' URL: give a folder, or s3://"),
        ({"sample_dir": "s3://key:secret@b/f"}, "with credentials, which logs would show"),
        ({"sample_dir": "s3://"}, "give a folder, or s3://BUCKET/FOLDER"),
        ({"sample_ratio": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_that_make_no_sense(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        Settings(**arguments)
    assert "secret" not in str(raised.value)
