"""Changes a model set's folder in one step: readers see the old set or the new one.

However a command ends (an error, a full disk, Ctrl-C, a kill, a power cut), the set is complete.
Files that a killed command leaves behind are harmless, and the next command removes them.

- :func:`change` writes and checks new files in a work folder inside the set. It moves them in under
  new names, then replaces the manifest, which names them, in one rename. The files that only the
  old one names go after that.
- :func:`create` builds the new set in ``.NAME.partial``, in the same folder. A folder cannot be
  replaced in one rename, so the old one goes to ``.NAME.old.partial``, the new one takes its name,
  then the old one is removed. Between the two renames nothing has the set's name;
  ``models.model_set`` then takes the old one from where it is, and never another set of that name.

Either keeps the set from before as an earlier version (:mod:`calibration.sets.transaction`) if
``made_by`` names the command that makes a new one; :func:`pin` makes one the current set again.

Writes, renames and removals are first made in memory, and may reach the disk in another order
(fsync(2), rename(2)). So a file's bytes are flushed before it is renamed to its final name, and the
folder is flushed before files that the rename replaced are removed.
"""

import errno
import fcntl
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import openvino as ov
import yaml
from pydantic import TypeAdapter, ValidationError

from models import golden
from models.errors import ModelSetError
from models.files import make_folder
from models.golden import GOLDEN_NAME, Golden, GoldenAnswer
from models.manifest import MANIFEST_NAME, Made, Manifest, Network, read_manifest
from models.model_set import BUNDLED_DIR, PARTIAL_SUFFIX, ModelSet, replaced_folder
from models.network import RuntimeOptions, load
from models.openvino_network import last_line, num_features, read_network
from models.record import FileRecord, Precision, sha256_of
from models.stores import MAX_EARLIER, VERSIONS_NAME, earlier_folders, is_fetched

MOVING_NAME = "moving.json"  # the files that come or go, noted in the work folder before any does
RECORDS = TypeAdapter(tuple[FileRecord, ...])


class Staging:
    """Stages the new files of a set in ``folder``; made by :func:`change` and :func:`create`."""

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
            xml=FileRecord.of(self.work, xml.name),
            bin=FileRecord.of(self.work, weights.name),
            features=num_features(model),
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
            note = self.work / MOVING_NAME  # for the clean-up after a kill
            note.write_bytes(RECORDS.dump_json(moving))
            flush(note)
            flush(self.work)
            for record in manifest.files:
                staged = self.work / record.path
                if staged.exists():
                    flush(staged)
                    staged.replace(self.folder / record.path)
            flush(self.folder)
            write_manifest(self.folder, manifest)


@contextmanager
def change(folder: Path, made_by: str | None = None) -> Iterator[Staging]:
    """Change the set in ``folder``, which stays untouched until :meth:`Staging.move_in`."""
    if made_by is not None:
        check_current(folder)
    if is_fetched(folder):
        raise ModelSetError(
            f"{folder} is a copy of a set in a store, and is fetched again when it was changed; "
            "copy it to a folder of yours, change that, and publish it: tandem models push"
        )
    work = folder / f".staging{PARTIAL_SUFFIX}"
    with _locked(folder):
        _tidy(folder, work)  # what a killed command left
        try:
            with writing(work):
                work.mkdir()
            yield Staging(folder, work, made_by)
        finally:
            _tidy(folder, work)


@contextmanager
def create(
    folder: Path, *, is_replaced: bool = False, made_by: str | None = None
) -> Iterator[Staging]:
    """Create a set at ``folder``, which appears complete if the block succeeds, or not at all."""
    check_free(folder, is_replaced=is_replaced)
    building = folder.with_name(f".{folder.name}{PARTIAL_SUFFIX}")
    aside = replaced_folder(folder)
    with writing(building):
        make_folder(building)
    with ExitStack() as locks:
        locks.enter_context(_locked(building))
        try:
            with writing(building):
                _put_back(aside, folder)  # if a killed command took it away
                for left in building.iterdir():
                    _remove(left)
                (work := building / f".staging{PARTIAL_SUFFIX}").mkdir()
            check_free(folder, is_replaced=is_replaced)
            if folder.exists():
                locks.enter_context(_locked(folder))
            yield Staging(building, work, made_by)
            with writing(folder):
                _remove(work)
                if made_by is not None:
                    keep_replaced(folder, building)
                try:
                    if folder.exists():
                        folder.replace(aside)
                    building.replace(folder)
                    flush(folder.parent)  # before the old one goes
                finally:
                    _put_back(aside, folder)  # if that failed
        except BaseException:
            _remove(building)
            raise


def pin(model_set: ModelSet, version: str) -> ModelSet:
    """Replace the set by an earlier version, in one step; the replaced set is kept as a version.

    Raises :class:`ModelSetError` if the set has no such version, a file of it was altered, the set
    is bundled, or another command changes it.
    """
    folder = model_set.folder
    if is_bundled(folder):
        raise ModelSetError(
            f"{folder} comes with the program and is read-only: no versions of it are kept"
        )
    wanted = model_set.in_version(version)
    if wanted.folder == folder:
        return wanted
    with create(folder, is_replaced=True, made_by="tandem models pin") as staging:
        # Nobody changes it now.
        wanted = ModelSet(folder, read_manifest(folder)).in_version(version)
        if problems := wanted.problems():
            raise ModelSetError(f"version {version} cannot be served: {problems[0]}")
        with writing(staging.folder):
            link_files(wanted, staging.folder)
            _link_users_own(folder, staging.folder)
    return ModelSet(folder, read_manifest(folder))


def _link_users_own(folder: Path, building: Path) -> None:
    """Link files that do not belong to the set, such as a user's notes, into the new folder."""
    ours = {MANIFEST_NAME, VERSIONS_NAME}
    ours |= {Path(record.path).parts[0] for record in read_manifest(folder).files}
    for path in folder.iterdir():
        target = building / path.name
        if path.name in ours or path.name.endswith(PARTIAL_SUFFIX) or target.exists():
            continue
        if path.is_dir():
            shutil.copytree(path, target, symlinks=True)
        else:
            link(path, target)


def check_free(folder: Path, *, is_replaced: bool, other: str = "name") -> None:
    """Raise :class:`ModelSetError` unless a set can be created at ``folder``.

    ``other`` names what the user can choose instead.
    """
    if folder.exists() and not is_replaced:
        raise ModelSetError(f"{folder} exists; give another {other}, or --replace it")
    if folder.exists() and not folder.is_dir():
        raise ModelSetError(f"{folder} is no folder; move it away, or give another {other}")
    if folder.exists() and not (folder / MANIFEST_NAME).exists() and any(folder.iterdir()):
        raise ModelSetError(
            f"{folder} is no model set, and has files; move it away, or give another {other}"
        )


def _put_back(aside: Path, folder: Path) -> None:
    """Restore the set that was put aside, unless another is in its place."""
    if aside.exists() and not folder.exists():
        aside.replace(folder)
    if not aside.is_symlink():
        _remove(aside / MANIFEST_NAME)  # first, so that what is left is no set to anybody
    _remove(aside)


def _tidy(folder: Path, work: Path) -> None:
    """Remove the work folder, and moved files that the manifest does not name."""
    try:
        moving = RECORDS.validate_json((work / MOVING_NAME).read_bytes())
    except (OSError, ValidationError):  # none had been moved
        moving = ()
    manifest = manifest_of(folder) if moving else None
    if manifest is not None:
        kept = {record.path for record in manifest.files}
        for name in ({record.path for record in moving} - kept) | {f"{MANIFEST_NAME}.partial"}:
            _remove(folder / name)
    _remove(work)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


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


def check_current(folder: Path) -> None:
    """Raise :class:`ModelSetError` for an earlier version's folder: a version never changes."""
    if folder.absolute().parent.name == VERSIONS_NAME:
        version = shlex.quote(f"{folder.absolute().parent.parent}@{folder.name}")
        raise ModelSetError(
            f"{folder} is an earlier version, which stays as it is; make it the current one first: "
            f"tandem models pin {version}"
        )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest in one step, so that no reader or power cut sees a part of it.

    Files that it names must have been flushed to the disk before.
    """
    partial = folder / f"{MANIFEST_NAME}.partial"
    content = manifest.model_dump(mode="json", exclude_defaults=False, exclude_none=True)
    partial.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), "utf-8")
    flush(partial)
    partial.replace(folder / MANIFEST_NAME)
    flush(folder)


def is_bundled(folder: Path) -> bool:
    """Whether the set comes with the program, in which case no versions of it are kept."""
    return folder.resolve().parent == BUNDLED_DIR.resolve()


def new_version(folder: Path, manifest: Manifest, made_by: str) -> Manifest:
    """Keep the set in ``folder`` as a version if ``manifest`` differs; record the command."""
    old, new = _readable(folder), ModelSet(folder, manifest)
    if old is not None and old.fingerprints == new.fingerprints:
        return manifest
    if old is not None and not is_bundled(folder):
        _keep(old, folder, new)
    return manifest.model_copy(
        update={"made": Made(by=made_by, at=datetime.now(UTC).replace(microsecond=0))}
    )


def keep_replaced(folder: Path, building: Path) -> None:
    """Keep the set in ``folder``, and its versions, in ``building``, which will replace it."""
    old, new = _readable(folder), _readable(building)
    if new is None or is_bundled(folder):
        return
    for place in reversed(earlier_folders(folder)):
        if (earlier := _readable(place)) is not None:
            _keep(earlier, building, new)
    if old is not None:
        _keep(old, building, new)


def link_files(model_set: ModelSet, folder: Path) -> None:
    """Link a set's existing files into another folder, and its manifest last."""
    for record in model_set.manifest.files:
        if model_set.is_here(record):
            link(model_set.folder / record.path, folder / record.path)
    # Copied, not linked: an editor may write a manifest in place.
    shutil.copyfile(model_set.folder / MANIFEST_NAME, folder / MANIFEST_NAME)
    flush(folder / MANIFEST_NAME)
    flush(folder)


def link(source: Path, target: Path) -> None:
    """Link a file, or copy it if the disk has no hard links; an existing target stays."""
    if target.exists():
        return
    make_folder(target.parent)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
        flush(target)


def _keep(old: ModelSet, folder: Path, new: ModelSet) -> None:
    known = tuple(old.fingerprints.values())
    if set(known) <= set(new.fingerprints.values()):
        return
    versions = folder / VERSIONS_NAME
    place = versions / known[0]
    partial = place.with_name(f"{place.name}{PARTIAL_SUFFIX}")
    for left in versions.glob(f"*{PARTIAL_SUFFIX}"):
        shutil.rmtree(left)
    partial.mkdir(parents=True)
    link_files(old, partial)
    shutil.rmtree(place, ignore_errors=True)
    partial.rename(place)
    flush(versions)
    for oldest in earlier_folders(folder)[MAX_EARLIER:]:
        shutil.rmtree(oldest)


def _readable(folder: Path) -> ModelSet | None:
    """Return the set in a folder; None if there is none, or its manifest cannot be read."""
    with suppress(ModelSetError):
        return ModelSet(folder, read_manifest(folder))
    return None


def flush(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's entries."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that flushes no folders (some networks')
            raise
    finally:
        os.close(opened)
