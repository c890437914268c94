"""A set is whole whatever happens while it is changed: errors, Ctrl-C, a full disk, a kill."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import openvino as ov
import pytest
from tiny_networks import LABELS, tiny_model, write_tiny_set

from calibration import staging as module
from calibration.staging import Staging, change, create
from models.errors import ModelSetError
from models.golden_record import Golden, read_golden
from models.manifest import ImageRecord, Manifest, MemberRecord, read_manifest, write_manifest
from models.model_set import ModelSet, list_folders, load_model_set
from models.record import FileRecord


@pytest.fixture
def folder(tiny_set, tmp_path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(tiny_set, tmp_path / "sets" / "tiny"))


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return every file's bytes, and None for every folder."""
    found = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): None if p.is_dir() else p.read_bytes() for p in found}


def with_network(staging: Staging, gain: float = 3.0, num_convolutions: int = 0) -> Manifest:
    """Stage another network of the first member and return the manifest that names it."""
    manifest = read_manifest(staging.folder)
    model = tiny_model(gain=gain, num_convolutions=num_convolutions)
    network = staging.network(model, "sure", is_float=False)
    first = manifest.members[0].model_copy(update={"networks": {"INT8": network}})
    changed = manifest.model_copy(update={"members": (first, *manifest.members[1:])})
    return changed.model_copy(update={"golden": staging.golden(changed)})


def with_texts(staging: Staging, manifest: Manifest, hint: str = "") -> Manifest:
    """Stage labels and class ids; quick."""
    update = {
        "labels": staging.text("labels.txt", "azure\nlime\nscarlet\n"),
        "class_ids": staging.text("class_ids.txt", "n0\nn1\nn2\n"),
        "description": "other words",
        "hint": hint,
    }
    return manifest.model_copy(update=update)


def change_texts(folder: Path, hint: str = "") -> None:
    manifest = read_manifest(folder)
    with change(folder) as staging:
        staging.move_in(with_texts(staging, manifest, hint))


def is_changed(folder: Path) -> bool:
    return "other words" in (folder / "manifest.yaml").read_text()


def make(staging: Staging, labels: tuple[str, ...] = ("a", "b", "c")) -> None:
    """Put a whole new set where ``staging`` is."""
    network = staging.network(tiny_model(gain=1.0), "only-fp16", is_float=True)
    manifest = Manifest(
        name="mine",
        description="made here",
        image=ImageRecord(input_size=16, resize_shorter=16),
        num_classes=3,
        labels=staging.text("labels.txt", "\n".join(labels)),
        members=(MemberRecord(name="only", source="code", networks={"FP16": network}),),
    )
    staging.move_in(manifest.model_copy(update={"golden": staging.golden(manifest)}))


def is_whole(folder: Path) -> bool:
    return load_model_set(str(folder)).problems() == []


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """Let no file grow over ``free`` bytes; Python ignores the signal, so that writes fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class InterruptAt:
    """Ctrl-C before the ``number``-th line that runs in staging.py; ``where``: its function."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""

    def __enter__(self) -> "InterruptAt":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = frame.f_code.co_name
                raise KeyboardInterrupt
        return self._trace


def test_a_change_names_only_its_own_files_and_the_old_ones_go(folder):
    old = read_manifest(folder)
    with change(folder) as staging:
        manifest = with_network(staging)
        staging.move_in(manifest)
    assert read_manifest(folder) == manifest
    assert is_whole(folder)
    gone = {"sure.xml", "sure.bin"}
    kept = {record.path for record in old.files} - gone
    added = {record.path for record in manifest.files} - kept
    assert set(contents(folder)) == kept | added | {"manifest.yaml"}
    assert {Path(name).suffix for name in added} == {".xml", ".bin", ".json"}


def test_the_same_change_again_and_again_never_writes_over_what_is_named(folder):
    for gain in (3.0, 3.0, 3.0, 5.0):
        before = read_manifest(folder).members[0].networks["INT8"]
        with change(folder) as staging:
            manifest = with_network(staging, gain)
            network = manifest.members[0].networks["INT8"]
            assert not (folder / network.xml.path).exists()
            assert not (folder / network.bin.path).exists()
            staging.move_in(manifest)
        assert is_whole(folder)
        assert before.xml.path != network.xml.path
        assert before.bin.path != network.bin.path
    assert len(contents(folder)) == len(read_manifest(folder).files) + 1


def test_files_that_are_not_the_sets_stay(folder):
    with change(folder) as staging:
        staging.move_in(with_network(staging))
    name = read_manifest(folder).members[0].networks["INT8"].bin.path
    (folder / "sure.bin").write_bytes(b"my own")
    (folder / "README.md").write_bytes(b"mine")
    with change(folder) as staging:
        staging.move_in(with_network(staging))
    assert not (folder / name).exists()
    assert (folder / "sure.bin").read_bytes() == b"my own"
    assert (folder / "README.md").read_bytes() == b"mine"


@pytest.mark.parametrize("error", [ValueError("a fault"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("is_staged", [False, True])
def test_an_exception_leaves_the_set_as_it_was(folder, error, is_staged):
    before = contents(folder)

    def fail() -> None:
        with change(folder) as staging:
            if is_staged:
                with_network(staging)
            raise error

    with pytest.raises(type(error)):
        fail()
    assert contents(folder) == before


def test_ctrl_c_at_any_line_leaves_the_old_set_or_the_new(tmp_path):
    first = write_tiny_set(tmp_path / "first", gains={"sure": 8.0})
    before, manifest = contents(first), read_manifest(first)
    folder, met = tmp_path / "tiny", {}
    while "" not in met.values():
        shutil.copytree(first, folder)
        with (
            InterruptAt(len(met) + 1) as interrupt,
            suppress(KeyboardInterrupt),
            change(folder) as staging,
        ):
            staging.move_in(with_texts(staging, manifest))
        place = met[len(met) + 1] = interrupt.where
        loaded = load_model_set(str(folder))
        assert loaded.problems() == [], f"line {len(met)}, in {place}"
        if place in ("text", "move_in", "writing"):  # what follows tidies up
            assert is_changed(folder) or contents(folder) == before, f"line {len(met)}, in {place}"
        if place != "_locked":  # a lock that is not given back ends with the process
            with change(folder):
                pass
            files = {record.path for record in loaded.manifest.files}
            assert set(contents(folder)) == files | {"manifest.yaml"}, f"line {len(met)}"
        shutil.rmtree(folder)
    assert set(met.values()) >= {"change", "text", "move_in", "_tidy", "_locked", "_remove"}


def test_ctrl_c_at_any_line_of_a_replacement_leaves_the_old_set_or_the_new(tmp_path):
    first = write_tiny_set(tmp_path / "first", gains={"sure": 8.0})
    before, manifest = contents(first), read_manifest(first)
    folder, met = tmp_path / "sets" / "tiny", {}
    while "" not in met.values():
        shutil.copytree(first, folder, dirs_exist_ok=True)
        with (
            InterruptAt(len(met) + 1) as interrupt,
            suppress(KeyboardInterrupt),
            create(folder, is_replaced=True) as staging,
        ):
            shutil.copytree(first, staging.folder, dirs_exist_ok=True)
            staging.move_in(with_texts(staging, manifest))
        place = met[len(met) + 1] = interrupt.where
        assert is_whole(folder), f"line {len(met)}, in {place}"
        assert is_changed(folder) or contents(folder) == before, f"line {len(met)}, in {place}"
        assert list_folders((folder.parent,)) == [folder]
        if place in ("text", "move_in", "writing"):
            assert [p.name for p in folder.parent.iterdir()] == ["tiny"], f"line {len(met)}"
        shutil.rmtree(folder)
    assert set(met.values()) >= {"create", "_swap", "_put_back", "_locked", "move_in"}
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize("free", [0, 40, 2000, 4900])
def test_a_full_disk_while_networks_are_written(folder, free):
    before = contents(folder)
    with (
        full_disk(free),
        pytest.raises(ModelSetError, match=r"cannot write .* The set is as it"),
        change(folder) as staging,
    ):
        with_network(staging, num_convolutions=2)
    assert contents(folder) == before


def test_a_full_disk_says_where_and_how_much_is_free(folder):
    with full_disk(40), pytest.raises(ModelSetError) as caught, change(folder) as staging:
        staging.text("labels.txt", "x" * 50)
    assert str(folder / ".staging.partial") in caught.value.message
    assert "File too large" in caught.value.message
    assert "MB are free there" in caught.value.message


def test_a_full_disk_while_files_are_moved_in(folder):
    """Texts and the note of what moves fit; the manifest, written last, does not."""
    before = contents(folder)
    with full_disk(2000), pytest.raises(ModelSetError, match="cannot write"):
        change_texts(folder, hint="long" * 500)
    assert contents(folder) == before


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_move_that_fails_takes_back_the_others(folder, monkeypatch, nth):
    before, calls, move = contents(folder), [], Path.replace

    def sometimes(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return move(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", sometimes)
        with pytest.raises(ModelSetError, match="Input/output error"):
            change_texts(folder)
    assert len(calls) == nth
    assert contents(folder) == before


@pytest.mark.parametrize("suffix", [".bin", ".xml"])
def test_a_network_cut_short_in_silence_gets_no_further(folder, monkeypatch, suffix):
    before, save = contents(folder), ov.save_model

    def cut_short(model: ov.Model, path: Path, **options: bool) -> None:
        save(model, path, **options)
        written = path.with_suffix(suffix)
        os.truncate(written, written.stat().st_size // 2)

    monkeypatch.setattr(ov, "save_model", cut_short)
    with pytest.raises(ModelSetError, match="OpenVINO cannot read"), change(folder) as staging:
        staging.move_in(with_network(staging, num_convolutions=2))
    assert contents(folder) == before


def test_a_network_that_does_not_run_is_an_error_that_names_it(folder):
    before = contents(folder)
    with change(folder) as staging:
        manifest = with_network(staging)
        staged = staging.work / manifest.members[0].networks["INT8"].xml.path
        staged.write_text("<net/>")
        with pytest.raises(ModelSetError, match=r"cannot run .*sure.*\.xml"):
            staging.golden(manifest)
    assert contents(folder) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from calibration import staging

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

staging.write_manifest = die
with staging.change(Path(sys.argv[1])) as files:
    manifest = staging.read_manifest(files.folder)
    labels = files.text("labels.txt", "a\\nb\\nc\\n")
    files.move_in(manifest.model_copy(update={"labels": labels}))
"""


def test_what_a_killed_change_left_goes_with_the_next(folder):
    before = contents(folder)
    root = Path(module.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", KILLED, folder], cwd=root, check=False)
    assert done.returncode == -9
    left = set(contents(folder)) - set(before)
    assert {name.partition("-")[0] for name in left if "/" not in name} >= {"labels"}
    assert is_whole(folder)
    with change(folder):
        assert set(contents(folder)) == set(before) | {".staging.partial"}
    assert contents(folder) == before


def test_a_note_of_moves_names_nothing_outside_the_set(folder):
    outside = folder.parent / "precious.txt"
    outside.write_text("keep me")
    work = folder / ".staging.partial"
    work.mkdir()
    record = {"path": "../precious.txt", "sha256": "0" * 64}
    (work / module.MOVING_NAME).write_text(f"[{record}]".replace("'", '"'))
    before = contents(folder)
    change_texts(folder)
    assert outside.read_text() == "keep me"
    assert set(before) - set(contents(folder)) >= {".staging.partial"}


def test_a_second_change_at_the_same_time_is_refused(folder):
    with change(folder) as staging:
        manifest = with_texts(staging, read_manifest(folder))
        with pytest.raises(ModelSetError, match="another command is changing"), change(folder):
            pass
        with (
            pytest.raises(ModelSetError, match="another command is changing"),
            create(folder, is_replaced=True),
        ):
            pass
        staging.move_in(manifest)  # its files were left alone
    assert is_whole(folder)
    change_texts(folder)


def test_a_blocking_call_in_a_change_is_not_taken_for_another_command(folder):
    with pytest.raises(BlockingIOError), change(folder):
        raise BlockingIOError(errno.EAGAIN, "not now")


def test_a_set_that_is_not_there_cannot_be_changed(tmp_path):
    with (
        pytest.raises(ModelSetError, match=r"cannot open .*nothing: No such file"),
        change(tmp_path / "nothing"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_new_set_appears_when_it_is_whole(tmp_path):
    folder = tmp_path / "sets" / "mine"
    with create(folder) as staging:
        make(staging)
        assert not folder.exists()
        assert list_folders((folder.parent,)) == []
    assert is_whole(folder)
    assert list_folders((folder.parent,)) == [folder]
    assert [p.name for p in folder.parent.iterdir()] == ["mine"]
    assert len(contents(folder)) == len(read_manifest(folder).files) + 1
    assert ModelSet(folder, read_manifest(folder)).golden is not None


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_new_set_that_fails_is_not_there(tmp_path, is_replaced):
    def fail() -> None:
        with create(tmp_path / "mine", is_replaced=is_replaced) as staging:
            make(staging)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_set_that_is_there_is_not_written_over(folder):
    before = contents(folder.parent)
    with (
        pytest.raises(ModelSetError, match="exists; give another name, or --replace"),
        create(folder),
    ):
        pass
    assert contents(folder.parent) == before


def test_a_set_is_replaced_as_a_whole(folder):
    with create(folder, is_replaced=True) as staging:
        make(staging)
        assert load_model_set(str(folder)).labels == LABELS
    assert load_model_set(str(folder)).labels == ("a", "b", "c")
    assert len(contents(folder)) == len(read_manifest(folder).files) + 1
    assert [p.name for p in folder.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_a_replacement_that_fails_brings_the_old_set_back(folder, monkeypatch, error):
    before, move = contents(folder.parent), Path.replace

    def failing(self: Path, target: Path) -> Path:
        if target == folder and "old" not in self.name:
            raise error
        return move(self, target)

    def replace() -> None:
        with create(folder, is_replaced=True) as staging:
            make(staging)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", failing)
        kind = ModelSetError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(kind):
            replace()
    assert contents(folder.parent) == before
    replace()
    assert is_whole(folder)


def test_a_set_that_a_killed_replacement_took_away_comes_back(folder):
    before = contents(folder)
    folder.replace(folder.with_name(".tiny.old.partial"))
    (folder.with_name(".tiny.partial") / "half").mkdir(parents=True)
    assert list_folders((folder.parent,)) == []
    with pytest.raises(ModelSetError, match="exists; give another name"), create(folder):
        pass
    assert contents(folder) == before
    assert [p.name for p in folder.parent.iterdir()] == ["tiny"]


def test_what_killed_replacements_left_goes_with_the_next(folder):
    shutil.copytree(folder, folder.with_name(".tiny.old.partial"))
    shutil.copytree(folder, folder.with_name(".tiny.partial"))
    with create(folder, is_replaced=True) as staging:
        make(staging)
    assert set(contents(folder)) == {r.path for r in read_manifest(folder).files} | {
        "manifest.yaml"
    }
    assert [p.name for p in folder.parent.iterdir()] == ["tiny"]


def test_two_commands_do_not_make_the_same_set_at_once(tmp_path):
    folder = tmp_path / "mine"
    with create(folder) as staging, create(tmp_path / "yours") as other:
        make(other)
        with pytest.raises(ModelSetError, match="another command is changing"), create(folder):
            pass
        make(staging)
    assert is_whole(folder)
    assert is_whole(tmp_path / "yours")


def test_a_full_disk_while_a_set_is_made(folder):
    before = contents(folder.parent)
    for free in (0, 100, 3000):
        with (
            full_disk(free),
            pytest.raises(ModelSetError, match="cannot write"),
            create(folder, is_replaced=True) as staging,
        ):
            make(staging)
        assert contents(folder.parent) == before


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(ModelSetError, match=r"cannot write .* Not a directory.* MB are free"),
        create(tmp_path / "file" / "sets" / "mine"),
    ):
        pass
    with (
        pytest.raises(ModelSetError, match="is no folder"),
        create(tmp_path / "file", is_replaced=True),
    ):
        pass
    assert (tmp_path / "file").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_link_is_replaced_and_what_it_leads_to_stays(folder, tmp_path):
    before = contents(folder)
    link = tmp_path / "links" / "tiny"
    link.parent.mkdir()
    link.symlink_to(folder)
    with create(link, is_replaced=True) as staging:
        make(staging)
    assert not link.is_symlink()
    assert is_whole(link)
    assert [p.name for p in link.parent.iterdir()] == ["tiny"]
    assert contents(folder) == before


def record_golden(folder: Path, golden: Golden) -> None:
    """Put other golden answers into the set, which its manifest knows of."""
    (folder / "golden.json").write_text(golden.model_dump_json())
    update = {"golden": FileRecord.of(folder, "golden.json")}
    write_manifest(folder, read_manifest(folder).model_copy(update=update))


@pytest.fixture
def elsewhere(folder) -> Path:
    """The set with golden answers that another CPU recorded."""
    with change(folder) as staging:
        manifest = read_manifest(folder)
        staging.move_in(manifest.model_copy(update={"golden": staging.golden(manifest)}))
    golden = read_golden(folder / "golden.json")
    answers = {
        name: {p: one.model_copy(update={"cpu": "elsewhere"}) for p, one in by.items()}
        for name, by in golden.answers.items()
    }
    record_golden(folder, Golden(answers=answers))
    return folder


def cpus(folder: Path) -> dict[str, str]:
    golden = load_model_set(str(folder)).golden
    assert golden is not None
    return {name: by["INT8"].cpu for name, by in golden.answers.items()}


def test_golden_answers_of_unchanged_networks_are_kept(elsewhere):
    assert cpus(elsewhere) == {"sure": "elsewhere", "unsure": "elsewhere"}
    with change(elsewhere) as staging:
        staging.move_in(with_network(staging))
    found = cpus(elsewhere)
    assert found["unsure"] == "elsewhere"
    assert found["sure"] != "elsewhere"


def test_golden_answers_do_not_go_with_a_network_to_another_member(elsewhere):
    with change(elsewhere) as staging:
        manifest = read_manifest(elsewhere)
        one, two = manifest.members
        swapped = manifest.model_copy(
            update={
                "members": (
                    one.model_copy(update={"networks": two.networks}),
                    two.model_copy(update={"networks": one.networks}),
                )
            }
        )
        staging.move_in(swapped.model_copy(update={"golden": staging.golden(swapped)}))
    assert "elsewhere" not in cpus(elsewhere).values()


def test_golden_answers_that_were_altered_are_not_taken_over(elsewhere):
    with (elsewhere / "golden.json").open("a") as file:
        file.write("\n")
    before = contents(elsewhere)
    with (
        pytest.raises(ModelSetError, match=r"golden\.json was altered"),
        change(elsewhere) as staging,
    ):
        with_network(staging)
    assert contents(elsewhere) == before
