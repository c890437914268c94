"""Samples: folders and stores, their bounds and what is erased, and the queue before them."""

import asyncio
import dataclasses
import json
import logging
import shutil
import stat
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.answers import Classified, Fault
from app.errors import ConfigError
from app.samples import samples
from app.samples.feedback import TaughtFolder
from app.samples.samples import (
    Erased,
    Erasing,
    Erasures,
    Sample,
    SampleBook,
    SampleEraser,
    SampleFolder,
    Sampler,
    SampleStore,
    SharedSamples,
    check_sample_store,
    disagreement_sampler_of,
    is_chosen,
    sample_of,
    sampler_of,
)
from app.serve.replica import Hub
from app.settings import Settings
from app.telemetry.metric_table import SAMPLES
from models.errors import StoreError
from models.stores import CLIENTS, files_below, remove_file, smart_open_file
from tests.support.answers import answer_of
from tests.support.cases import cases
from tests.support.fakes import FakeHandle
from tests.support.full_disk import full_disk
from tests.support.object_stores import local_azure_store, local_google_store, local_s3
from tests.support.services.processes import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")
START = datetime(2026, 11, 26, tzinfo=UTC)
KIB = 1024
WITHIN_S = 30.0
FAULT = Fault(400, "not_an_image", "these bytes are no image")


def sample(number: int, size: int = KIB) -> Sample:
    """The ``number``-th sample, of about ``size`` bytes, its answer among them."""
    return sample_of(b"\xff\xd8\xff" * (size // 3), answer_of(), 0, START + timedelta(0, number))


def of_request(request_id: str) -> Classified:
    return dataclasses.replace(answer_of(), request_id=request_id)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def place_of(sampler):
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
    assert SampleFolder(tmp_path, 16 * KIB).write(sample(1))
    assert not partial.exists()


def test_a_new_folder_and_every_sample_are_their_owners_alone(tmp_path: Path) -> None:
    for folder in (tmp_path / "a" / "samples", tmp_path):
        SampleFolder(folder, 16 * KIB).write(sample(0))
    assert stat.S_IMODE((tmp_path / "a" / "samples").stat().st_mode) == 0o700
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_folder_that_a_neighbour_made_first_gets_no_photos(shared_place, neighbour) -> None:
    neighbour("mkdir -m 777 samples")
    with pytest.raises(PermissionError, match="another user's"):
        SampleFolder(shared_place / "samples", 16 * KIB).write(sample(0))
    assert names(shared_place / "samples") == []


def test_a_folder_that_went_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    place = SampleFolder(folder, KIB * KIB)
    place.write(sample(0))
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        place.write(sample(1))
    assert place.write(sample(2))


def test_a_full_disk_leaves_no_half_of_a_sample(tmp_path: Path) -> None:
    place = SampleFolder(tmp_path / "samples", KIB * KIB)
    with full_disk(20 * KIB), pytest.raises(OSError, match="large"):
        place.write(sample(0, 64 * KIB))
    assert names(tmp_path / "samples") == []


@pytest.fixture
def s3(monkeypatch):
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


def test_what_an_id_names_is_erased_everywhere_in_a_folder(tmp_path: Path) -> None:
    settings = Settings(sample_dir=str(tmp_path), teach=True, teach_dir=str(tmp_path / "taught"))
    erased = Erased()
    eraser = SampleEraser(settings, 64, erased)
    assert eraser.erase(["1"]) == {}  # no folder is there yet
    both = SampleFolder(tmp_path, KIB * KIB), SampleFolder(tmp_path / "disagreements", KIB * KIB)
    rows = [of_request(name) for name in ("a/b", "other", "third")]
    kept = [sample_of(b"?", row, place, START) for place, row in enumerate(rows)]
    for place in both:
        assert all(map(place.write, kept))
    taught = TaughtFolder(tmp_path / "taught", KIB * KIB, 10)
    photograph = taught.keep(b"a", "x", "fake")
    taught.correct("a/b", 0, "y", "fake")
    assert eraser.erase(["a/b", kept[1].stem, "unknown"]) == {"a/b": 3, kept[1].stem: 2}
    assert {name.partition(".")[0] for name in names(tmp_path) if "." in name} == {kept[2].stem}
    assert eraser.erase([photograph.id]) == {photograph.id: 1}
    assert list((tmp_path / "taught").iterdir()) == []
    results = Results()
    sampler = Sampler(1.0, both[0], results, erased=erased)  # one that was still to be written
    for row in rows:
        sampler.note(row.request_id, [b"?"], [row])
    assert results.wait(3) == {"dropped": 1, "written": 2}


def test_samples_older_than_the_days_go(tmp_path: Path) -> None:
    days = [START - timedelta(days=n) for n in range(5)]
    kept = [sample_of(b"?", answer_of(), 0, day) for day in days]
    (tmp_path / "holiday.jpg").write_bytes(b"mine")
    assert all(map(SampleFolder(tmp_path, KIB * KIB).write, kept))
    settings = Settings(sample_dir=str(tmp_path))
    SampleEraser(settings, 64, Erased()).erase_before(START - timedelta(days=2))
    assert {name.partition(".")[0] for name in names(tmp_path)} == {
        "holiday",
        *(own.stem for own in kept[:3]),
    }
    young = settings.model_copy(update={"sample_days": 1})  # they are of another year
    SampleEraser(young, 64, Erased())
    wait_until(lambda: names(tmp_path) == ["holiday.jpg"], WITHIN_S, "old samples to go")


@pytest.mark.parametrize("local", [local_s3, local_google_store, local_azure_store])
def test_a_store_erases_by_id_and_by_age(local, monkeypatch):
    with local(monkeypatch) as bucket:
        url = f"{bucket}/samples"
        rows = [of_request(str(number)) for number in range(3)]
        kept = [sample_of(b"?", row, 0, START + timedelta(n)) for n, row in enumerate(rows)]
        for sample in kept:
            place = SampleStore(url, KIB * KIB, now=lambda: START)
            assert place.write(sample)
        with smart_open_file(f"{url}/20261126/notes.txt", "wb") as opened:
            opened.write(b"mine")
        eraser = SampleEraser(Settings(sample_dir=url), 64, Erased())
        assert eraser.erase(["1"]) == {"1": 1}
        eraser.erase_before(START + timedelta(1))
        left = {name.rpartition("/")[2] for name in files_below(url)}
        assert left == {"notes.txt", *(name for name, _ in kept[2].files)}
        remove_file(f"{url}/20261126/gone.jpg")  # another Gateway was quicker
        with pytest.raises(StoreError, match="cannot list"):
            list(files_below(url.replace("bucket-", "no-such-bucket-of-mine-")))


async def test_all_gateways_erase_and_one_that_starts_later_does(tmp_path, monkeypatch):
    monkeypatch.setattr("app.serve.replica.start_replica", lambda _: None)
    book = SampleBook(Erasures())
    shared, folders = [], [tmp_path / name for name in "abc"]
    for folder in folders:
        assert SampleFolder(folder, KIB * KIB).write(sample_of(b"?", answer_of(), 0, START))
        eraser = SampleEraser(Settings(sample_dir=str(folder)), 64, Erased())
        shared.append(SharedSamples(FakeHandle(Hub(Settings(), book)), eraser))
    first, second, third = shared
    await second._exchange()
    waiting = asyncio.create_task(first.erase("1"))
    for _ in range(3):
        await asyncio.sleep(0.05)
        await second._exchange()
    assert await waiting == Erasing("1", 2, 2, 2)
    assert [names(folder) for folder in folders[:2]] == [[], []]
    await third._exchange()
    assert names(folders[2]) == []
    again = SampleBook(Erasures())  # its replica was replaced, and learns from the Gateways
    for gateway in shared:
        gateway._handle = FakeHandle(Hub(Settings(), again))
    await second._exchange()
    assert again.facts.ids == {"1": 1}


def test_a_store_that_is_gone_says_so(s3: str) -> None:
    place = SampleStore("s3://no-such-bucket-of-mine/samples", KIB * KIB)
    with pytest.raises(StoreError, match="cannot write s3://no-such-bucket-of-mine/samples/"):
        place.write(sample(0))


def test_the_settings_say_where(tmp_path: Path) -> None:
    assert sampler_of(Settings()) is None
    assert sampler_of(Settings(sample_dir=str(tmp_path))) is None  # the ratio is 0
    for folder, kind in ((str(tmp_path), SampleFolder), ("s3://b/f", SampleStore)):
        assert isinstance(place_of(sampler_of(Settings(sample_dir=folder, sample_ratio=0.5))), kind)
    assert list(tmp_path.iterdir()) == []  # nothing before the first sample


def test_samples_and_disagreements_share_the_bound(tmp_path: Path) -> None:
    assert disagreement_sampler_of(Settings(sample_mib=1)) is None
    settings = Settings(sample_dir=str(tmp_path), sample_ratio=1, sample_mib=1)
    of_all = sampler_of(settings, has_versions=True)
    places = place_of(of_all), place_of(disagreement_sampler_of(settings))
    for number in range(300):
        for place in places:
            assert place.write(sample(number, 4 * KIB))
    of_disagreements = num_bytes(tmp_path / "disagreements")
    of_samples = sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file())
    assert KIB * KIB / 8 < of_disagreements <= KIB * KIB / 4
    assert KIB * KIB / 2 < of_samples <= KIB * KIB * 3 / 4


def test_disagreements_go_to_a_folder_of_the_store(s3: str) -> None:
    place = place_of(disagreement_sampler_of(Settings(sample_dir=f"{s3}/")))
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


@cases(
    "arguments, message",
    ({"sample_ratio": 0.1}, "sample_dir is not set: set it to a folder or a URL"),
    ({"sample_dir": "https://host/f"}, "sample_dir is a 'https' URL: give a folder, or s3://"),
    ({"sample_dir": "s3://key:secret@b/f"}, "with credentials, which logs would show"),
    ({"sample_dir": "s3://"}, "give a folder, or s3://BUCKET/FOLDER"),
    ({"sample_ratio": 1.5}, "less than or equal to 1"),
)
def test_settings_that_make_no_sense(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        Settings(**arguments)
    assert "secret" not in str(raised.value)


def note(sampler: Sampler, num: int, image: bytes = b"a") -> None:
    for number in range(num):
        sampler.note(f"id{number}", [image], [answer_of()])


class Results:
    """The results that a sampler tells, and a wait for as many as a test expects."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._changed = threading.Condition()

    def __call__(self, result: str) -> None:
        with self._changed:
            self.counts[result] += 1
            self._changed.notify_all()

    def wait(self, number: int) -> Counter[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: self.counts.total() >= number, WITHIN_S)
        return self.counts


class Place:
    """Keeps samples in memory; waits for ``gate``, and raises while it ``is_broken``."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False

    def write(self, sample: Sample) -> bool:
        assert self.gate.wait(WITHIN_S)
        self.threads.add(threading.current_thread().name)
        if self.is_broken:
            raise OSError(28, "No space left on device")
        self.samples.append(sample)
        return True

    def erase(self, is_meant) -> set[str]:
        raise AssertionError("nothing is erased here")


@pytest.fixture
def results() -> Results:
    return Results()


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def kept(place: Place, results: Results) -> Sampler:
    """A sampler of everything."""
    return Sampler(1.0, place, results, lambda: datetime(2026, 1, 2, tzinfo=UTC))


def test_images_with_an_answer_are_kept_on_another_thread(kept, place, results) -> None:
    kept.note("id", [b"a", b"b", b"c"], [answer_of(), FAULT, answer_of()])
    kept.note("pixels", [], [answer_of()])
    assert results.wait(2) == {"written": 2}
    assert [sample.image for sample in place.samples] == [b"a", b"c"]
    assert b'"image":2' in place.samples[1].text
    assert place.threads == {"samples"}
    assert all(sample.stem.startswith("20260102T000000") for sample in place.samples)


def test_a_disagreement_is_kept_whatever_the_ratio(place: Place, results: Results) -> None:
    kept = Sampler(0.0, place, results)
    note(kept, 1)
    kept.note_disagreement(b"b", answer_of(), answer_of(sure=True), 3)
    assert results.wait(1) == {"written": 1}
    (sample,) = place.samples
    row = json.loads(sample.text)
    assert (sample.image, row["disagrees"]["sure"], row["image"]) == (b"b", True, 3)


def test_the_ratio_counts(place: Place, results: Results) -> None:
    note(Sampler(0.5, place, results), 200)
    chosen = sum(is_chosen(f"id{number}", 0, 0.5) for number in range(200))
    assert results.wait(chosen) == {"written": chosen}
    assert 60 < chosen < 140


def test_what_the_queue_has_no_room_for_is_dropped(kept, place, results) -> None:
    place.gate.clear()
    number = samples.MAX_WAITING + 10
    note(kept, number)  # returns, though nothing is written
    assert 9 <= results.counts["dropped"] <= 10  # the thread may have one in its hands
    place.gate.set()
    assert results.wait(number)["written"] == number - results.counts["dropped"]
    note(kept, 1)
    results.wait(number + 1)
    assert len(place.samples) == results.counts["written"]


def test_waiting_images_have_bytes_in_all(kept, place, results, monkeypatch):
    monkeypatch.setattr(samples, "MAX_WAITING_BYTES", 100)
    place.gate.clear()
    note(kept, 20, b"a" * 30)
    assert 16 <= results.counts["dropped"] <= 17
    place.gate.set()
    results.wait(20)
    note(kept, 1, b"a" * 90)  # the room is there again
    assert results.wait(21)["written"] == 21 - results.counts["dropped"]


def test_a_place_that_fails_is_logged_and_no_answers_trouble(kept, place, results, caplog):
    place.is_broken = True
    with caplog.at_level(logging.ERROR, "ray.serve"):
        note(kept, 20)
        assert results.wait(20) == {"failed": 20}
    (line,) = caplog.messages
    assert "cannot write samples (OSError: [Errno 28] No space left on device)" in line


def test_a_sample_that_is_too_large_is_dropped_and_the_others_stay(tmp_path, results) -> None:
    kept = Sampler(1.0, SampleFolder(tmp_path, 16 * KIB), results)
    note(kept, 1)
    note(kept, 1, b"a" * 17 * KIB)
    assert results.wait(2) == {"written": 1, "dropped": 1}
    assert len(names(tmp_path)) == 2


def test_the_metric(told):
    samples.record_sample("written")
    assert told.of(SAMPLES) == {("written",): 1.0}
