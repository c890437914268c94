"""Changing a model set so that it is always whole: old until the very last step, then new.

New files are written into a folder of their own inside the set, moved in under names that nothing
has yet, and named by the manifest, which is replaced in one step. Whatever ends a command before
that (an error, a full disk, Ctrl-C) leaves the set as it was.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openvino as ov

from models import golden
from models.errors import ModelSetError
from models.golden_record import GOLDEN_NAME, Golden, GoldenAnswer, read_golden
from models.manifest import MANIFEST_NAME, Manifest, Network, read_manifest, write_manifest
from models.model_set import PARTIAL_SUFFIX
from models.record import FileRecord, Precision, sha256_of
from models.runtime import CompiledNetwork, RuntimeOptions


class Staging:
    """Files on their way into ``folder``; made by :func:`change` and :func:`create`."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work

    def network(self, model: ov.Model, stem: str, *, is_float: bool) -> Network:
        """Write an IR (float weights as FP16) and describe it as the manifest does."""
        xml, weights = self.work / f"{stem}.xml", self.work / f"{stem}.bin"
        with writing(xml):
            ov.save_model(model, xml, compress_to_fp16=is_float)
        if (self.folder / xml.name).exists():  # the set as it is may need it until the end
            stem = f"{stem}-{sha256_of(weights)[:8]}"
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

    def golden(self, manifest: Manifest) -> FileRecord:
        """Record what every network of ``manifest`` answers; unchanged ones keep their answers."""
        old = read_manifest(self.folder) if (self.folder / MANIFEST_NAME).exists() else None
        before: dict[str, dict[Precision, GoldenAnswer]] = {}
        if old is not None and old.golden is not None:
            before = read_golden(self.folder / old.golden.path).answers
        known = {n for m in old.members for n in m.networks.values()} if old else set()
        answers: dict[str, dict[Precision, GoldenAnswer]] = {}
        for member in manifest.members:
            for precision, network in member.networks.items():
                kept = before.get(member.name, {}).get(precision) if network in known else None
                answer = kept or golden.answer_of(self._compiled(network))
                answers.setdefault(member.name, {})[precision] = answer
        return self.text(GOLDEN_NAME, Golden(answers=answers).model_dump_json() + "\n")

    def _compiled(self, network: Network) -> CompiledNetwork:
        staged = self.work / network.xml.path
        path = staged if staged.exists() else self.folder / network.xml.path
        return CompiledNetwork(path, RuntimeOptions(batch_sizes=(8,)))

    def move_in(self, manifest: Manifest) -> None:
        """Move what ``manifest`` names into the folder; then replace the manifest; then tidy."""
        old = read_manifest(self.folder) if (self.folder / MANIFEST_NAME).exists() else None
        with writing(self.folder):
            for record in manifest.files:
                staged = self.work / record.path
                if staged.exists():
                    staged.replace(self.folder / record.path)
            write_manifest(self.folder, manifest)
        kept = {record.path for record in manifest.files}
        for record in old.files if old else ():
            if record.path not in kept:
                (self.folder / record.path).unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what a full disk or a forbidden folder raises into an error that says so."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: OpenVINO's stream failed
        place = path if path.is_dir() else path.parent
        free_mb = shutil.disk_usage(place).free / 1e6
        raise ModelSetError(
            f"cannot write {path}: {error}; {free_mb:.0f} MB are free there. The set is as it "
            "was: make room, or write elsewhere"
        ) from error


@contextmanager
def change(folder: Path) -> Iterator[Staging]:
    """Change the set in ``folder``; nothing of it is touched before :meth:`Staging.move_in`."""
    work = folder / f".staging{PARTIAL_SUFFIX}"
    with _locked(folder), _work_folder(work):
        yield Staging(folder, work)


@contextmanager
def create(folder: Path, *, is_replaced: bool = False) -> Iterator[Staging]:
    """Make a new set at ``folder``; it appears whole, when the block ends well, or not at all."""
    if folder.exists() and not is_replaced:
        raise ModelSetError(f"{folder} exists; give another name, or --replace it")
    building = folder.with_name(f".{folder.name}{PARTIAL_SUFFIX}")
    with _work_folder(building), _locked(building):
        work = building / f".staging{PARTIAL_SUFFIX}"
        work.mkdir()
        yield Staging(building, work)
        shutil.rmtree(work)
        if folder.exists():
            aside = folder.with_name(f".{folder.name}.old{PARTIAL_SUFFIX}")
            folder.replace(aside)
            building.replace(folder)
            shutil.rmtree(aside)
        else:
            building.replace(folder)


@contextmanager
def _work_folder(folder: Path) -> Iterator[None]:
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)  # what a killed command left
        folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second command from changing the same set; the lock ends with the process."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ModelSetError(f"another command is changing {folder}; wait until it ends") from error
    finally:
        os.close(opened)
