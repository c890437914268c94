"""Stages a model set's new files: writes and checks them in a work folder, then moves them in.

The work folder is inside the set. The files are moved in under new names, and the manifest, which
names them, is replaced last and in one step.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import openvino as ov
from pydantic import TypeAdapter

from calibration.sets.durable import flush, write_manifest
from calibration.sets.history import new_version
from models import golden
from models.errors import ModelSetError
from models.golden import GOLDEN_NAME, Golden, GoldenAnswer
from models.manifest import MANIFEST_NAME, Manifest, Network, read_manifest
from models.model_set import ModelSet
from models.record import FileRecord, Precision, sha256_of
from models.runtime import last_line, read_network
from models.runtimes.load import load
from models.runtimes.options import RuntimeOptions

MOVING_NAME = "moving.json"  # the files that come or go, noted in the work folder before any does
RECORDS = TypeAdapter(tuple[FileRecord, ...])


class Staging:
    """The new files of a set in ``folder``; made by :mod:`calibration.sets.transaction`."""

    def __init__(self, folder: Path, work: Path, made_by: str | None = None) -> None:
        self.folder, self.work, self._made_by = folder, work, made_by

    def check_room(self, num_bytes: int) -> None:
        """Raise :class:`ModelSetError` if the disk has less room, before minutes of work."""
        if _free_mb(self.folder) < num_bytes / 1e6:
            raise ModelSetError(
                f"{self.folder}: {_free_mb(self.folder):.0f} MB are free there, and about "
                f"{num_bytes / 1e6:.0f} are needed. Make room"
            )

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

    def file(self, content: bytes, stem: str) -> Network:
        """Write the one file of a network for ONNX Runtime."""
        path = self.work / f"{self._free(stem, sha256(content).hexdigest()[:8])}.onnx"
        with writing(path):
            path.write_bytes(content)
        return Network(runtime="onnxruntime", file=FileRecord.of(self.work, path.name))

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
        """Return an unused name: the set needs its present files until the end."""
        stems = (stem, f"{stem}-{digits}", f"{stem}-{digits}{os.urandom(4).hex()}")
        taken = {path.stem for path in self.folder.iterdir()}
        return next(name for name in stems if name not in taken)

    def golden(self, manifest: Manifest) -> FileRecord:
        """Record the golden answers of every network; unchanged networks keep theirs."""
        old = manifest_of(self.folder)
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
        opened = network.files[0].path
        path = self.work / opened if (self.work / opened).exists() else self.folder / opened
        try:
            return golden.answer_of(load(path, RuntimeOptions(batch_sizes=(8,))))
        except RuntimeError as error:
            raise ModelSetError(
                f"{network.runtime} cannot run {path}: {last_line(error)}"
            ) from error

    def move_in(self, manifest: Manifest) -> None:
        """Move what ``manifest`` names into the folder, then replace the manifest.

        Files that it no longer names are removed when the change ends. Everything reaches the disk
        in this order, so that a power cut leaves the old set or the new one: the note of moved
        files, their bytes, their names, the manifest's bytes, its name.
        """
        old = manifest_of(self.folder)
        with writing(self.folder):
            if self._made_by is not None:
                manifest = new_version(self.folder, manifest, self._made_by)
            moving = (*(old.files if old else ()), *manifest.files)
            self._note(moving)
            for record in manifest.files:
                staged = self.work / record.path
                if staged.exists():
                    flush(staged)
                    staged.replace(self.folder / record.path)
            flush(self.folder)
            write_manifest(self.folder, manifest)

    def _note(self, moving: tuple[FileRecord, ...]) -> None:
        """Write down which files are added or removed, for the clean-up after a kill."""
        note = self.work / MOVING_NAME
        note.write_bytes(RECORDS.dump_json(moving))
        flush(note)
        flush(self.work)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of a full disk or a read-only folder into a :class:`ModelSetError`."""
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


def manifest_of(folder: Path) -> Manifest | None:
    """Return the set's manifest, if it has one."""
    return read_manifest(folder) if (folder / MANIFEST_NAME).exists() else None
