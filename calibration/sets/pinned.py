"""Makes an earlier version of a set the current one again."""

import shutil
from pathlib import Path

from calibration.sets.history import is_bundled, link, link_files
from calibration.sets.staging import writing
from calibration.sets.transaction import create
from models.errors import ModelSetError
from models.manifest import MANIFEST_NAME, read_manifest
from models.model_set import PARTIAL_SUFFIX, ModelSet
from models.versions import VERSIONS_NAME


def pin(model_set: ModelSet, version: str) -> ModelSet:
    """Replace the set by an earlier version, in one step; the replaced set is kept as a version.

    Raises:
        ModelSetError: the set has no such version, a file of it was altered, the set is bundled, or
            another command changes it.

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
        wanted = ModelSet(folder, read_manifest(folder)).in_version(
            version
        )  # nobody changes it now
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
