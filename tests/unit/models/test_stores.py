"""Model sets at URLs, of a local web server: whole, broken, gone, or in the version asked for."""

import base64
import functools
import gzip
import os
import shutil
import sys
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from app.settings import Settings
from calibration.sets.transaction import write_manifest
from models import stores
from models.errors import ModelSetError, StoreError
from models.machine import MissingExtraError
from models.manifest import MANIFEST_NAME, read_manifest
from models.model_set import earlier_sets, load_model_set
from models.stores import MAX_EARLIER, is_url, push, split_version
from tests.support import stored_sets
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.full_disk import full_disk
from tests.support.http_server import QuietRequest, ThreadedServer
from tests.support.tiny_networks import write_tiny_set

# Google's client says so of a package that it can do without.
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")
FORMS = "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A set that keeps an earlier version, as a command leaves it."""
    earlier = write_tiny_set(tmp_path / "earlier" / "tiny", gains={"old": 3.0})
    folder = write_tiny_set(tmp_path / "sets" / "tiny")
    shutil.copytree(earlier, folder / ".versions" / load_model_set(str(earlier)).fingerprint())
    return folder


class Files(QuietRequest, SimpleHTTPRequestHandler):
    """Serves a folder; notes what is asked for, and breaks off or refuses as often as asked."""

    folder: ClassVar[Path]
    asked: ClassVar[list[str]] = []
    num_broken: ClassVar[int] = 0
    status: ClassVar[int] = 0
    page: ClassVar[bytes] = b""  # of a server that answers every path with 200
    compressed: ClassVar[str] = "if asked"
    redirected: ClassVar[str] = ""
    credentials: ClassVar[str | None] = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, directory=str(self.folder))

    def do_GET(self) -> None:
        self.asked.append(self.path)
        Files.credentials = self.headers["authorization"]
        if Files.status:
            self.send(Files.status, b"")
        elif self.path.endswith(".bin") and Files.num_broken:
            Files.num_broken -= 1
            self.close_connection = True
            self.send(200, b"half", content_length="100000")
        elif Files.redirected and self.path.startswith("/tiny"):
            self.send(302, b"", location=f"{Files.redirected}{self.path}")
        elif Files.compressed == "always" or "gzip" in self.headers["accept-encoding"]:
            body = gzip.compress(Path(self.translate_path(self.path)).read_bytes())
            self.send(200, body, content_encoding="gzip")
        elif Files.page and not Path(self.translate_path(self.path)).is_file():
            self.send(200, Files.page)
        else:
            super().do_GET()


@pytest.fixture
def url(shop, monkeypatch):
    state = {"folder": shop.parent, "asked": [], "num_broken": 0, "status": 0, "page": b""}
    for name, value in (state | {"compressed": "if asked", "redirected": ""}).items():
        monkeypatch.setattr(Files, name, value, raising=False)
    with ThreadedServer(Files) as server:
        yield f"{server.url}/tiny"


def measured_anew(shop: Path) -> Path:
    """Change what no fingerprint covers."""
    manifest = read_manifest(shop)
    write_manifest(shop, manifest.model_copy(update={"description": f"{manifest.description}!"}))
    return shop


def test_only_the_manifest_and_its_files_are_read(shop, url):
    (shop / "secret.txt").write_text("not the set's")
    taken = load_model_set(url)
    assert (taken.problems(), stored_sets.cached()) == ([], [stored_sets.manifest_of(shop)])
    assert taken.fingerprint() == stored_sets.version_of(shop)
    names = {record.path for record in taken.manifest.files} | {MANIFEST_NAME}
    assert {path.rpartition("/")[2] for path in Files.asked} == names
    Files.asked.clear()
    load_model_set(url)  # again: no file
    assert {path.rpartition("/")[2] for path in Files.asked} == {MANIFEST_NAME}


def test_a_lock_that_is_none_is_told_and_not_waited_for(shop, url):
    lock = load_model_set(url).folder.with_name("lock")
    lock.unlink()
    os.mkfifo(lock)
    measured_anew(shop)
    with pytest.raises(StoreError, match=r"cannot keep .*: it is neither file nor folder"):
        load_model_set(url)


def test_a_version_in_the_cache_asks_nobody_but_for_a_file_that_was_altered(shop, url):
    first = load_model_set(url)
    version = f"{url}@{first.fingerprint()}"
    (first.folder / "sure.bin").write_bytes(b"altered")
    assert load_model_set(version).problems() == []
    Files.asked.clear()
    shutil.rmtree(shop)
    again = load_model_set(version)
    assert (again.folder, again.problems(), Files.asked) == (first.folder, [], [])


def test_an_earlier_version_of_a_set_whose_versions_are_kept(shop, url):
    """A folder as ``--replace`` leaves it, served as it is."""
    version = stored_sets.version_of(shop)
    earlier = shop.rename(shop.with_name("old"))
    write_tiny_set(shop, gains={"other": 3.0})
    shutil.copytree(earlier, shop / ".versions" / version)
    taken = load_model_set(f"{url}@{version}")
    assert (taken.fingerprint(), taken.problems()) == (version, [])
    with pytest.raises(
        StoreError, match=f"is version {stored_sets.version_of(shop)}, not 0{{12}}; this mach"
    ):
        load_model_set(f"{url}@{'0' * 12}")


def test_a_manifest_that_changed_is_taken_though_its_version_stays(shop, url):
    """A fingerprint covers neither accuracy nor golden answers, and one precision alone."""
    first = load_model_set(url)
    second = load_model_set(url.replace("/tiny", f"/{measured_anew(shop).name}"))
    assert second.manifest.description == "three colours!"
    assert second.fingerprint() == first.fingerprint()
    shutil.rmtree(shop)
    for folder in (first.folder, second.folder):  # a folder's name asks for this one
        assert load_model_set(f"{url}@{folder.name}").folder == folder
    assert load_model_set(f"{url}@{first.fingerprint()}").folder == second.folder


def test_a_whole_folder_that_a_killed_process_left_is_no_version(shop, url):
    taken = load_model_set(url)
    left = taken.folder.rename(taken.folder.with_name("partial"))
    (left / "another.bin").touch()  # of the manifest that it was fetching
    again = load_model_set(f"{url}@{taken.fingerprint()}")
    assert again.folder == left.with_name(stored_sets.manifest_of(shop))
    assert not (again.folder / "another.bin").exists()
    assert stored_sets.cached() == [again.folder.name]


def test_a_version_is_of_the_precision_that_is_asked_for(shop, url):
    both = stored_sets.with_two_precisions(shop)
    for precision in ("INT8", "FP16"):
        assert load_model_set(f"{url}@{both[precision]}", None, precision).problems() == []
    with pytest.raises(ModelSetError, match=f"{both['INT8']} in INT8, not {both['FP16']}"):
        load_model_set(f"{url}@{both['FP16']}", None, "INT8")
    assert load_model_set(f"{url}@{stored_sets.manifest_of(shop)}", None, "INT8").problems() == []


def test_the_cache_keeps_the_sets_that_are_used(shop, url):
    used = load_model_set(url).folder
    for _ in range(MAX_EARLIER + 2):
        measured_anew(shop)
        last = load_model_set(url).folder
        assert load_model_set(f"{url}@{used.name}").folder == used
    assert {used.name, last.name} < set(stored_sets.cached())
    assert len(stored_sets.cached()) == 1 + MAX_EARLIER


def test_a_set_that_another_process_removes_meanwhile(shop, url, monkeypatch):
    removed = load_model_set(url).folder
    measured_anew(shop)
    used = load_model_set(url).folder
    listed = Path.glob

    def glob(self: Path, pattern: str) -> list[Path]:
        paths = list(listed(self, pattern))
        shutil.rmtree(removed, ignore_errors=True)
        return paths

    monkeypatch.setattr(Path, "glob", glob)
    assert load_model_set(f"{url}@{used.name}").folder == used
    assert not removed.exists()


def test_a_cache_that_is_read_only_serves(url, tmp_path, monkeypatch):
    taken = load_model_set(url)
    (taken.folder.parent / "lock").unlink()

    make = Path.mkdir

    def refused(path: Path, *arguments: Any, **options: Any) -> None:
        """Fail in the cache: root, as which tests may run, may write everywhere."""
        if path.is_relative_to(tmp_path / "cache"):
            raise PermissionError(30, "Read-only file system")
        make(path, *arguments, **options)

    for name in ("os.utime", "pathlib.Path.mkdir"):
        monkeypatch.setattr(name, refused)
    assert load_model_set(url).folder == taken.folder
    assert load_model_set(f"{url}@{taken.fingerprint()}").folder == taken.folder
    assert not (taken.folder.parent / "lock").exists()


def test_files_come_as_they_are(shop, url):
    stored_sets.with_an_odd_name(shop)
    assert load_model_set(url).problems() == []
    Files.compressed = "always"
    with pytest.raises(StoreError, match=r"manifest\.yaml comes as gzip: let the server send"):
        load_model_set(url)


def test_a_server_that_answers_every_path_with_a_page(shop, url):
    Files.page = b"<!doctype html><title>Sign in</title>"
    assert load_model_set(f"{url}@{stored_sets.version_of(shop)}").problems() == []
    with pytest.raises(StoreError, match=r"/nowhere/manifest\.yaml is no manifest: "):
        load_model_set(f"{url}/nowhere")


def test_a_redirect_from_https_to_http_is_refused(shop, monkeypatch):
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.scheme)
        return httpx.Response(302, headers={"location": "http://cdn/tiny?signature=SECRET"})

    client = functools.partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    with pytest.raises(StoreError, match=r"manifest\.yaml leads to http://cdn: not safe; this"):
        load_model_set("https://host/tiny")
    assert asked == ["https"]


@pytest.mark.parametrize("place", ["https://me:SECRET@host/x", "s3://KEY:SECRET@bucket/x"])
def test_credentials_in_a_url_are_refused_and_not_said(shop, place):
    for tried in (lambda: load_model_set(place), lambda: push(shop, ["0" * 12], place)):
        with pytest.raises(StoreError, match=r"holds credentials.*environment") as raised:
            tried()
        assert "SECRET" not in str(raised.value)


def test_credentials_of_a_web_server_are_netrcs(url, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    load_model_set(url)
    assert Files.credentials is None
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login me password SECRET\n")
    netrc.chmod(0o600)
    load_model_set(url)
    assert Files.credentials == f"Basic {base64.b64encode(b'me:SECRET').decode()}"


def test_what_a_redirect_signs_is_not_said(url):
    Files.redirected = f"{url.removesuffix('/tiny')}/other?signature=SECRET"
    with pytest.raises(StoreError, match="404") as raised:
        load_model_set(url)
    assert "SECRET" not in str(raised.value)


def with_a_path(shop: Path, path: str) -> None:
    manifest = shop / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace("sure.xml", f"{path}.xml", 1))


@cases("spoil, problem", 
        (lambda shop: (shop / "sure.bin").write_bytes(b"other"),
         r"/tiny/sure\.bin was altered: its sha256 is .*push the"),
        (lambda shop: (shop / "sure.bin").unlink(), r"^cannot read \S+/tiny/sure\.bin: .*404"),
        (lambda shop: (shop / MANIFEST_NAME).unlink(), r"^cannot read \S+/manifest\.yaml: .*404"),
        (lambda shop: with_a_path(shop, "../../outside"), "stay inside it"),
        (lambda shop: with_a_path(shop, "/etc/outside"), "stay inside it"),
        (lambda _: setattr(stores, "MAX_FILE_BYTES", 50), "has over 50 bytes, the limit"),
    
ids=["altered", "no file", "no set", "above", "absolute", "too large"], )  # fmt: skip
def test_what_is_refused_leaves_nothing(shop, url, monkeypatch, spoil, problem):
    monkeypatch.setattr(stores, "MAX_FILE_BYTES", stores.MAX_FILE_BYTES)
    spoil(shop)
    with pytest.raises(ModelSetError, match=problem):
        load_model_set(url)
    assert stored_sets.cached() == []


def test_a_download_that_breaks_off_is_tried_again_and_at_last_leaves_nothing(url):
    Files.num_broken = 100
    with pytest.raises(StoreError, match=r"^cannot read http\S+\.bin: \w+: .*has no copy$"):
        load_model_set(url)
    assert (stored_sets.cached(), sum(path.endswith(".bin") for path in Files.asked)) == ([], 3)
    Files.num_broken = 2
    assert load_model_set(url).problems() == []


def test_a_full_disk_leaves_nothing(url):
    with full_disk(40), pytest.raises(StoreError, match=r"^cannot keep \S+ in .*: .*make room"):
        load_model_set(url)
    assert stored_sets.cached() == []


@pytest.mark.parametrize(("status", "tries"), [(403, 1), (429, 3), (503, 3)])
def test_a_store_that_refuses(url, status, tries):
    Files.status = status
    with pytest.raises(StoreError, match=rf"^cannot read \S+: HTTPStatusError: .*{status}"):
        load_model_set(url)
    assert len(Files.asked) == tries


def test_a_store_that_is_gone_says_what_this_machine_has(shop, url):
    with pytest.raises(StoreError, match=r"^cannot read http://127.0.0.1:1/tiny.*has no copy$"):
        load_model_set("http://127.0.0.1:1/tiny")
    version = load_model_set(url).fingerprint()
    Files.status = 503
    with pytest.raises(StoreError, match=f"this machine has version {version}: URL@VERSION asks"):
        load_model_set(url)
    assert load_model_set(f"{url}@{version}").fingerprint() == version


@cases(
    "package, scheme, extra",
    *(("azure.identity", "az", "azure"), ("smart_open", "s3", "s3")),
    ("google.cloud.storage.retry", "gs", "gcs"),
)
def test_a_package_that_is_not_installed(shop, monkeypatch, package, scheme, extra):
    monkeypatch.setitem(sys.modules, package, None)
    says = rf"^{scheme}://\S+ needs .*'tandem-serve\[{extra}\]'"
    with pytest.raises(MissingExtraError, match=says):
        load_model_set(f"{scheme}://bucket/tiny")


@cases("call, place, problem", 
        (load_model_set, "https://host/x?token=SECRET",
         r"^https://host/x: the URL of a set has no \? and no #"),
        (load_model_set, "https://host/x#y", r"^https://host/x: the URL"),
        (load_model_set, "hf://user",
         r"^hf://user names no folder: write .*hf://USER/REPOSITORY/FOLDER"),
        (load_model_set, "s3:///", r"names no folder: write s3://BUCKET/FOLDER"),
        (push, "https://h/x", r"^cannot write to https://h/x: push to s3://BUC"),
        (push, "/tmp/x", f"^/tmp/x is no URL of a store: write {FORMS}$"),
    
)  # fmt: skip
def test_urls_that_cannot_be_read_or_written(shop, call, place, problem):
    with pytest.raises(StoreError, match=problem):
        call(*((shop, [stored_sets.version_of(shop)], place) if call is push else (place,)))


def test_the_hubs_files_are_those_of_the_main_branch(shop, url, monkeypatch):
    monkeypatch.setattr(stores, "HUB", url.removesuffix("/tiny"))
    shutil.copytree(shop, (shop.parent / "me" / "sets" / "resolve" / "main") / "tiny")
    assert load_model_set("hf://me/sets/tiny").problems() == []


@cases(
    "name, parts",
    ("tiny", ("tiny", None)),
    ("tiny@0123456789ab", ("tiny", "0123456789ab")),
    ("a@b/tiny@0123456789ab", ("a@b/tiny", "0123456789ab")),
    ("tiny@0123456789ab/", ("tiny@0123456789ab/", None)),
    ("tiny@0123456789AB", ("tiny@0123456789AB", None)),
    ("@0123456789ab", ("@0123456789ab", None)),
)
def test_a_version_is_twelve_digits_behind_the_last_at(name, parts):
    assert split_version(name) == parts


@pytest.mark.parametrize("name", ["s3", "file:///x", "a/b", "://", "ftp://h/x", "azure://b/x"])
def test_what_is_no_url(name):
    assert not is_url(name)


def test_the_current_and_the_earlier_version_by_name_and_by_path(folder):
    (place,) = (folder / ".versions").iterdir()
    current = load_model_set("tiny", (folder.parent,))
    for name in ("tiny", str(folder)):
        assert load_model_set(f"{name}@{current.fingerprint()}", (folder.parent,)) == current
        earlier = load_model_set(f"{name}@{place.name}", (folder.parent,))
        assert earlier.folder == place
        assert [member.name for member in earlier.manifest.members] == ["old"]


def test_another_version_is_refused_with_both(folder):
    current = load_model_set(str(folder)).fingerprint()
    with pytest.raises(ModelSetError) as caught:
        load_model_set(f"{folder}@0123456789ab")
    assert f"is version {current}, not 0123456789ab" in caught.value.message
    assert f"tandem models history {folder}" in caught.value.message
    with pytest.raises(ModelSetError, match="behind @ is a version, twelve hexadecimal digits"):
        load_model_set("tiny@newest", (folder.parent,))


def test_a_service_wants_the_version_of_its_precision(folder):
    stored_sets.with_two_precisions(folder)
    both = load_model_set(str(folder)).fingerprints
    assert len(set(both.values())) == 2
    for precision, version in both.items():
        settings = Settings(model_set=f"{folder}@{version}", precision=precision)
        assert settings.load_set().fingerprint(precision) == version
        assert load_model_set(f"{folder}@{version}").folder == folder
    says = f"is version {both['INT8']} in INT8, not {both['FP16']}"
    with pytest.raises(ModelSetError, match=says):
        Settings(model_set=f"{folder}@{both['FP16']}").load_set()


def test_an_earlier_version_that_cannot_be_read_hides_no_other(folder, caplog):
    damaged = folder / ".versions" / "0123456789ab"
    damaged.mkdir()
    (damaged / "manifest.yaml").write_text("runtime_of_tomorrow: 1\n")
    current = load_model_set(str(folder))
    assert load_model_set(f"{folder}@{current.fingerprint()}") == current
    places = {place.name for place in (folder / ".versions").iterdir()} - {damaged.name}
    (earlier,) = earlier_sets(folder)
    assert {earlier.folder.name} == places
    assert f"{damaged} is left out" in caplog.text
    assert tandem("models", "history", str(folder)).exit_code == 0
