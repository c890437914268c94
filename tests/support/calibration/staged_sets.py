"""Changes to stage, from two texts to a whole new set, and what a folder has before and after."""

import os
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from calibration.sets.transaction import Staging, change, create
from models.errors import ModelSetError
from models.manifest import Manifest, MemberRecord, read_manifest
from models.model_set import load_model_set
from models.record import ImageRecord
from tests.support.tiny_networks import tiny_model


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


def replace(folder: Path, made_by: str | None = None) -> None:
    with create(folder, is_replaced=True, made_by=made_by) as staging:
        make(staging)


def refused(match: str, begun: AbstractContextManager[Staging]) -> None:
    """Assert that a change does not begin, for this reason."""
    with pytest.raises(ModelSetError, match=match), begun:
        pass


@contextmanager
def failing(owner, name, code, when=lambda *_: True):
    """Have calls of a function fail with an error of the system; ``when``: which of them."""
    real = getattr(owner, name)

    def called(*arguments: object, **options: object) -> object:
        if when(*arguments):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, called)
        yield


def is_whole(folder: Path) -> bool:
    return load_model_set(str(folder)).problems() == []
