"""Transactions on a model set's folder: readers see the old set until the last step.

However a command ends (an error, a full disk, Ctrl-C, a kill, a power cut), the set is complete.
Files that a killed command leaves behind are harmless, and the next command removes them.

- :func:`change` replaces the manifest in one rename; the files that only the old one names go
  after that.
- :func:`create` builds the new set in ``.NAME.partial``, in the same folder. A folder cannot be
  replaced in one rename, so the old one goes to ``.NAME.old.partial``, the new one takes its name,
  then the old one is removed. Between the two renames nothing has the set's name;
  ``models.model_set`` then takes the old one from where it is, and never another set of that name.

Either keeps the set from before as an earlier version (:mod:`calibration.sets.history`), where
``made_by`` names the command that makes a new one.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from calibration.sets.durable import flush
from calibration.sets.history import check_current, keep_replaced
from calibration.sets.staging import MOVING_NAME, RECORDS, Staging, manifest_of, writing
from models.errors import ModelSetError
from models.manifest import MANIFEST_NAME
from models.model_set import PARTIAL_SUFFIX, replaced_folder
from models.stores import is_fetched


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
        building.mkdir(parents=True, exist_ok=True)
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
                _swap(building, folder, aside)
        except BaseException:
            _remove(building)
            raise


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


def _swap(building: Path, folder: Path, aside: Path) -> None:
    """Replace the old set by the new one, and restore the old one if that fails."""
    try:
        if folder.exists():
            folder.replace(aside)
        building.replace(folder)
        flush(folder.parent)  # before the old one goes
    finally:
        _put_back(aside, folder)


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
    """Remove the file or folder, if it can be."""
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
