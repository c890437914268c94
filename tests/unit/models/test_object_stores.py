"""Model sets in object stores on this machine: pushed, fetched once, broken off, refused, gone."""

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from models.errors import StoreError
from models.manifest import MANIFEST_NAME, read_manifest
from models.model_set import load_model_set
from models.stores import _azure_options, copy_file, push, smart_open_file
from tests.support import object_stores
from tests.support.command_line import tandem
from tests.support.stored_sets import (
    cached,
    manifest_of,
    version_of,
    with_an_odd_name,
    with_two_precisions,
)
from tests.support.tiny_networks import write_tiny_set

# Google's client says so of a package that it can do without.
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")
OPTIONS = re.compile(r"\?(?=alt=|generation=)")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@dataclass(frozen=True)
class Kind:
    """A kind of store: how it starts, the variable with its address, and what its client says."""

    start: Callable[[pytest.MonkeyPatch], AbstractContextManager[str]]
    endpoint: str
    no_set: str
    no_bucket: str
    gone: str
    refused: str
    no_credentials: str
    without_credentials: dict[str, str | None]  # variables


KINDS = {
    "s3": Kind(
        object_stores.local_s3,
        object_stores.S3_ENDPOINT,
        no_set="NoSuchKey",
        no_bucket="NoSuchBucket",
        gone="Could not connect",
        refused="403",
        no_credentials="Unable to locate credentials",
        without_credentials=dict.fromkeys(object_stores.S3_KEYS)
        | {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"},
    ),
    "gs": Kind(
        object_stores.local_google_store,
        object_stores.GOOGLE_ENDPOINT,
        no_set=r"NotFound: 404 blob \S+ not found in ",
        no_bucket="the store answered 404 Not Found",
        gone="Connection refused",
        refused="Forbidden: 403",
        no_credentials="Your default credentials were not found",
        without_credentials=dict.fromkeys(
            (object_stores.GOOGLE_ENDPOINT, "GOOGLE_APPLICATION_CREDENTIALS")
        )
        | {"CLOUDSDK_CONFIG": "/nowhere", "NO_GCE_CHECK": "true"},
    ),
    "az": Kind(
        object_stores.local_azure_store,
        object_stores.AZURE_ENDPOINT,
        no_set="ResourceNotFoundError: ",
        no_bucket="ResourceNotFoundError: ",
        gone="Connection refused",
        refused="HttpResponseError: .*Forbidden",
        no_credentials="DefaultAzureCredential failed to retrieve a token",
        without_credentials={object_stores.AZURE_ENDPOINT: None, "AZURE_STORAGE_ACCOUNT": "shop"}
        | {"AZURE_TOKEN_CREDENTIALS": "EnvironmentCredential"},
    ),
}


ANY = pytest.mark.parametrize("kind", ["az"], indirect=True)  # it is the same in each


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def store(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the set in a store, behind a relay; clients ask again for a moment only."""
    monkeypatch.setattr("models.stores.RETRY_S", 0.2)
    with kind.start(monkeypatch) as bucket:
        (address,) = ADDRESS.findall(os.environ[kind.endpoint])
        with object_stores.store_relay(address) as relay:
            redirect(kind, relay, monkeypatch)
            yield f"{bucket}/sets/tiny"


def redirect(kind: Kind, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the clients another address of the store."""
    monkeypatch.setenv(kind.endpoint, ADDRESS.sub(address, os.environ[kind.endpoint]))


def own(waits: list[float]) -> list[float]:
    """Return the waits between tries of ours; the clients have their own, at random."""
    return [wait for wait in waits if wait in (1, 2)]


def contents_read(shop):
    """Return the sorted names of the objects whose content was asked for."""
    paths = [path for method, path in object_stores.StoreRelay.asked if method == "GET"]
    contents = [OPTIONS.split(path)[0] for path in paths if "projection=" not in path]  # Google's
    return sorted(path.partition("/sets/tiny/")[2] for path in contents)


def test_only_the_manifest_and_its_files_are_read_and_once(shop, store):
    push(shop, [version_of(shop)], store)
    object_stores.StoreRelay.asked.clear()
    with ThreadPoolExecutor(4) as threads:
        folders = {taken.folder for taken in threads.map(load_model_set, [store] * 4)}
    assert [folder.name for folder in folders] == cached() == [manifest_of(shop)]
    pushed = f".versions/{manifest_of(shop)}"
    names = [f"{pushed}/{record.path}" for record in read_manifest(shop).files]
    manifests = [f"{pushed}/{MANIFEST_NAME}", *[MANIFEST_NAME] * 4]
    assert contents_read(shop) == sorted([*names, *manifests])
    object_stores.StoreRelay.asked.clear()
    version = load_model_set(store).fingerprint()  # again: no file
    assert contents_read(shop) == [MANIFEST_NAME]
    object_stores.StoreRelay.asked.clear()
    assert load_model_set(f"{store}@{version}").problems() == []
    assert object_stores.StoreRelay.asked == []


def test_a_set_that_is_pushed_is_there_in_all_its_versions(shop, store):
    first = version_of(shop)
    push(shop, [first], store)
    taken = load_model_set(store)
    assert (taken.fingerprint(), taken.problems()) == (first, [])
    shutil.rmtree(os.environ["XDG_CACHE_HOME"])
    shutil.rmtree(shop)
    write_tiny_set(shop, gains={"other": 3.0})
    push(shop, [second := version_of(shop)], store)
    assert load_model_set(store).fingerprint() == second != first
    earlier = load_model_set(f"{store}@{first}")
    assert (earlier.fingerprint(), earlier.problems()) == (first, [])
    assert cached() == sorted([manifest_of(shop), earlier.folder.name])


def test_the_command_pushes_names_too_that_a_url_must_quote(shop, store):
    with_an_odd_name(shop)
    done = tandem("models", "push", shop, store)
    assert (done.exit_code, done.output.split()[-1]) == (0, version_of(shop)), done.output
    assert load_model_set(store).problems() == []


@ANY
def test_a_push_leaves_the_versions_of_other_manifests(shop, store):
    """INT8 stays, the float networks are others: their fingerprints find each its own set."""
    first = with_two_precisions(shop)
    push(shop, list(first.values()), store)
    old = manifest_of(shop)
    second = with_two_precisions(shop, gain=5.0)
    push(shop, list(second.values()), store)
    assert first["INT8"] == second["INT8"]
    for version, folder in (
        (first["FP16"], old),
        (old, old),
        (second["FP16"], manifest_of(shop)),
        (second["INT8"], manifest_of(shop)),
    ):
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
        taken = load_model_set(f"{store}@{version}")
        assert (taken.folder.name, taken.problems()) == (folder, [])


@pytest.mark.parametrize("num_bytes", [0, 1, 2**20, 2**20 + 1, 5 * 2**20])
def test_a_file_of_any_size_comes_back(shop, store, num_bytes, tmp_path):
    content = os.urandom(num_bytes)
    with smart_open_file(f"{store}/file", "wb") as opened:
        opened.write(content)
    digest = copy_file(f"{store}/file", tmp_path / "copy", num_bytes)
    assert (tmp_path / "copy").read_bytes() == content
    assert digest == hashlib.sha256(content).hexdigest()


@ANY
def test_a_set_that_lacks_files_is_not_pushed(shop, store, kind):
    versions = list(with_two_precisions(shop).values())
    for name in ("float.xml", "float.bin"):
        (shop / name).unlink()
    assert load_model_set(str(shop)).problems() == []  # as a wheel's is
    with pytest.raises(StoreError, match=r"lacks float\.xml, float\.bin.*fetch imagenette-float"):
        push(shop, versions, store)
    with pytest.raises(StoreError, match=kind.no_set):
        load_model_set(store)


def test_no_bucket_and_no_set(shop, store, kind):
    with pytest.raises(StoreError, match=rf"^cannot read \S+-not/manifest\.yaml: .*{kind.no_set}"):
        load_model_set(f"{store}-not")
    scheme = store.partition("://")[0]
    with pytest.raises(StoreError, match=rf"^cannot write {scheme}://none-such/.*{kind.no_bucket}"):
        push(shop, [version_of(shop)], f"{scheme}://none-such/tiny")


def test_a_download_that_breaks_off_is_tried_again_and_at_last_leaves_nothing(shop, store):
    push(shop, [version_of(shop)], store)
    object_stores.StoreRelay.num_broken = sys.maxsize
    with pytest.raises(StoreError, match=r"^cannot read \S+\.bin: \w+: .*has no copy$"):
        load_model_set(store)
    assert cached() == []
    object_stores.StoreRelay.num_broken = 2
    assert load_model_set(store).problems() == []
    assert object_stores.StoreRelay.num_broken == 0


def test_a_store_that_refuses(shop, store, kind, waits):
    object_stores.StoreRelay.status = 403
    with pytest.raises(StoreError, match=rf"^cannot read \S+/manifest\.yaml: .*{kind.refused}"):
        load_model_set(store)
    assert waits == []
    with pytest.raises(StoreError, match=r"^cannot write \S+: .*(403|Forbidden)"):
        push(shop, [version_of(shop)], store)


def test_a_store_that_is_gone(shop, store, kind, monkeypatch, caplog, waits):
    redirect(kind, "http://127.0.0.1:1", monkeypatch)
    with pytest.raises(StoreError, match=rf"^cannot read \S+.*{kind.gone}.*has no copy$"):
        load_model_set(store)
    assert own(waits) == [1, 2]
    with pytest.raises(StoreError, match=rf"^cannot write \S+.*{kind.gone}"):
        push(shop, [version_of(shop)], store)
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_store_without_credentials(shop, store, kind, monkeypatch, waits):
    push(shop, [version_of(shop)], store)
    for name, value in kind.without_credentials.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    object_stores.forget_session(monkeypatch)
    with pytest.raises(StoreError, match=rf"^cannot read \S+: .*{kind.no_credentials}.*; this mac"):
        load_model_set(store)
    assert own(waits) == []
    assert cached() == []


def test_azures_account_must_be_named_and_takes_an_identity(shop, monkeypatch):
    for name in (object_stores.AZURE_ENDPOINT, "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StoreError, match=r"names no account: set AZURE_STORAGE_CONNECTION_STRING"):
        load_model_set("az://container/tiny")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "shop")
    client = _azure_options()["client"]
    assert client.url == "https://shop.blob.core.windows.net/"
    assert type(client.credential).__name__ == "DefaultAzureCredential"
