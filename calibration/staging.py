"""Changing a model set so that it is always whole: old until the very last step, then new.

New files are written into a folder of their own inside the set, moved in under names that nothing
has yet, and named by the manifest, which is replaced in one step. Whatever ends a command before
that (an error, a full disk, Ctrl-C) leaves the set as it was; what a killed one leaves behind is
harmless, and the next one removes it.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import openvino as ov
from pydantic import TypeAdapter, ValidationError

from models import golden
from models.errors import ModelSetError
from models.golden_record import GOLDEN_NAME, Golden, GoldenAnswer
from models.manifest import MANIFEST_NAME, Manifest, Network, read_manifest, write_manifest
from models.model_set import PARTIAL_SUFFIX, ModelSet
from models.record import FileRecord, Precision, sha256_of
from models.runtime import CompiledNetwork, RuntimeOptions, read_network

MOVING_NAME = "moving.json"  # the files that come or go, noted in the work folder before any does
RECORDS = TypeAdapter(tuple[FileRecord, ...])


class Staging:
    """Files on their way into ``folder``; made by :func:`change` and :func:`create`."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work

    def network(self, model: ov.Model, stem: str, *, is_float: bool) -> Network:
        """Write an IR (float weights as FP16) and describe it as the manifest does."""
        xml, weights = self.work / f"{stem}.xml", self.work / f"{stem}.bin"
        with writing(xml):
            ov.save_model(model, xml, compress_to_fp16=is_float)
            read_network(xml)  # one that was cut short gets no further
            stem = self._free(stem, sha256_of(weights)[:8])
            xml = xml.replace(xml.with_name(f"{stem}.xml"))
            weights = weights.replace(weights.with_name(f"{stem}.bin"))
        return Network(
            xml=FileRecord.of(self.work, xml.name), bin=FileRecord.of(self.work, weights.name)
        )

    def text(self, name: str, text: str) -> FileRecord:
        """Write a text file and describe it."""
        path = self.work / name
        if (self.folder / name).exists():
            stem, dot, suffix = name.partition(".")
            path = self.work / f"{stem}-{os.urandom(4).hex()}{dot}{suffix}"
        with writing(path):
            path.write_text(text, "utf-8")
        return FileRecord.of(self.work, path.name)

    def _free(self, stem: str, digits: str) -> str:
        """Return a name that the set has not: it may need its own files until the end."""
        stems = (stem, f"{stem}-{digits}", f"{stem}-{digits}{os.urandom(4).hex()}")
        taken = {path.stem for path in self.folder.iterdir()}
        return next(name for name in stems if name not in taken)

    def golden(self, manifest: Manifest) -> FileRecord:
        """Record what every network of ``manifest`` answers; unchanged ones keep their answers."""
        old = _manifest_of(self.folder)
        known = ModelSet(self.folder, old).golden if old else None
        before = known.answers if known else {}
        members = old.members if old else ()
        same = {(m.name, p): network for m in members for p, network in m.networks.items()}
        answers: dict[str, dict[Precision, GoldenAnswer]] = {}
        for member in manifest.members:
            for precision, network in member.networks.items():
                is_same = same.get((member.name, precision)) == network
                kept = before.get(member.name, {}).get(precision) if is_same else None
                answers.setdefault(member.name, {})[precision] = kept or self._answer_of(network)
        return self.text(GOLDEN_NAME, Golden(answers=answers).model_dump_json() + "\n")

    def _answer_of(self, network: Network) -> GoldenAnswer:
        staged = self.work / network.xml.path
        path = staged if staged.exists() else self.folder / network.xml.path
        try:
            return golden.answer_of(CompiledNetwork(path, RuntimeOptions(batch_sizes=(8,))))
        except RuntimeError as error:
            last_line = str(error).strip().splitlines()[-1]
            raise ModelSetError(f"OpenVINO cannot run {path}: {last_line}") from error

    def move_in(self, manifest: Manifest) -> None:
        """Move what ``manifest`` names into the folder, then replace the manifest.

        What it names no more goes when the change ends.
        """
        old = _manifest_of(self.folder)
        with writing(self.folder):
            moving = (*(old.files if old else ()), *manifest.files)
            (self.work / MOVING_NAME).write_bytes(RECORDS.dump_json(moving))
            for record in manifest.files:
                staged = self.work / record.path
                if staged.exists():
                    staged.replace(self.folder / record.path)
            write_manifest(self.folder, manifest)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what a full disk or a forbidden folder raises into an error that says so."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: OpenVINO's stream failed
        raise ModelSetError(
            f"cannot write {path}: {error}; {_free_mb(path):.0f} MB are free there. The set is as "
            "it was: make room, or write elsewhere"
        ) from error


def _free_mb(path: Path) -> float:
    for place in (path, *path.parents):  # the folder itself may not be there
        with suppress(OSError):
            return shutil.disk_usage(place).free / 1e6
    return 0.0


@contextmanager
def change(folder: Path) -> Iterator[Staging]:
    """Change the set in ``folder``; nothing of it is touched before :meth:`Staging.move_in`."""
    work = folder / f".staging{PARTIAL_SUFFIX}"
    with _locked(folder):
        _tidy(folder, work)  # what a killed command left
        try:
            with writing(work):
                work.mkdir()
            yield Staging(folder, work)
        finally:
            _tidy(folder, work)


@contextmanager
def create(folder: Path, *, is_replaced: bool = False) -> Iterator[Staging]:
    """Make a new set at ``folder``; it appears whole, when the block ends well, or not at all."""
    _check_free(folder, is_replaced=is_replaced)
    building = folder.with_name(f".{folder.name}{PARTIAL_SUFFIX}")
    aside = folder.with_name(f".{folder.name}.old{PARTIAL_SUFFIX}")
    with writing(building):
        building.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks:
        locks.enter_context(_locked(building))
        try:
            with writing(building):
                _put_back(aside, folder)  # if a killed command took it away
                for left in building.iterdir():
                    _remove(left)
                (work := building / f".staging{PARTIAL_SUFFIX}").mkdir()
            _check_free(folder, is_replaced=is_replaced)
            if folder.exists():
                locks.enter_context(_locked(folder))
            yield Staging(building, work)
            with writing(folder):
                _remove(work)
                _swap(building, folder, aside)
        except BaseException:
            _remove(building)
            raise


def _check_free(folder: Path, *, is_replaced: bool) -> None:
    if folder.exists() and not is_replaced:
        raise ModelSetError(f"{folder} exists; give another name, or --replace it")
    if folder.exists() and not folder.is_dir():
        raise ModelSetError(f"{folder} is no folder; move it away, or give another name")


def _swap(building: Path, folder: Path, aside: Path) -> None:
    """Put the new set in the place of the old, which comes back if that fails."""
    try:
        if folder.exists():
            folder.replace(aside)
        building.replace(folder)
    finally:
        _put_back(aside, folder)


def _put_back(aside: Path, folder: Path) -> None:
    """Restore the set that was put aside, unless another is in its place."""
    if aside.exists() and not folder.exists():
        aside.replace(folder)
    _remove(aside)


def _tidy(folder: Path, work: Path) -> None:
    """Remove the work folder, and of the files that came or went what the manifest has not."""
    try:
        moving = RECORDS.validate_json((work / MOVING_NAME).read_bytes())
    except (OSError, ValidationError):  # none had been moved
        moving = ()
    manifest = _manifest_of(folder) if moving else None
    if manifest is not None:
        kept = {record.path for record in manifest.files}
        for name in ({record.path for record in moving} - kept) | {f"{MANIFEST_NAME}.partial"}:
            _remove(folder / name)
    _remove(work)


def _remove(path: Path) -> None:
    """Remove what is there, if it can be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _manifest_of(folder: Path) -> Manifest | None:
    return read_manifest(folder) if (folder / MANIFEST_NAME).exists() else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second command from changing the same set; the lock ends with the process."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ModelSetError(f"cannot open {folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_same = os.path.samestat(os.fstat(opened), folder.stat())
        except (BlockingIOError, FileNotFoundError):
            is_same = False
        if not is_same:  # locked by another, or replaced by it meanwhile
            raise ModelSetError(f"another command is changing {folder}; wait until it ends")
        yield
    finally:
        os.close(opened)
