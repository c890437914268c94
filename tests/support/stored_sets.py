"""Sets that tests push and fetch: their names in a store and what the cache has of them."""

import os
from pathlib import Path

from calibration.sets.transaction import write_manifest
from models.manifest import MANIFEST_NAME, read_manifest
from models.model_set import load_model_set
from models.record import FileRecord, Precision, sha256_of
from tests.support.tiny_networks import save_model, tiny_model


def version_of(folder: Path) -> str:
    return load_model_set(str(folder)).fingerprint()


def manifest_of(folder: Path) -> str:
    """Return what a set's folder in the cache and in a store is called."""
    return sha256_of(folder / MANIFEST_NAME)[:12]


def with_two_precisions(shop: Path, gain: float = 7.0) -> dict[Precision, str]:
    """Add float networks, the same for each member; return the fingerprint in each precision."""
    network = save_model(tiny_model(gain=gain), shop, "float")
    manifest = read_manifest(shop)
    members = tuple(
        member.model_copy(update={"networks": {**member.networks, "FP16": network}})
        for member in manifest.members
    )
    write_manifest(shop, manifest.model_copy(update={"members": members}))
    return load_model_set(str(shop)).fingerprints


def with_an_odd_name(shop: Path) -> None:
    (shop / "labels.txt").rename(shop / "all of #1?.txt")
    labels = FileRecord.of(shop, "all of #1?.txt")
    write_manifest(shop, read_manifest(shop).model_copy(update={"labels": labels}))


def cached() -> list[str]:
    """Return what the cache has of all URLs, without locks."""
    folder = Path(os.environ["XDG_CACHE_HOME"])
    return sorted(path.name for path in folder.glob("tandem/sets/*/*") if path.name != "lock")
