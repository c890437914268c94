"""What the hub says of a file, from a real server on this machine."""

import socket
from hashlib import sha256

import pytest

from calibration.sets.files import DownloadError, HubFile, hub_file
from tests.support.calibration.hub_server import COMMIT, HubServer

DATA = b"tensors"
REPOSITORY, NAME = "timm/net.in1k", "model.safetensors"
HINT = "give --weights-dir DIR"


pytestmark = pytest.mark.usefixtures("no_proxy")


@pytest.fixture
def hub():
    with HubServer({f"{REPOSITORY}/{NAME}": DATA}) as running:
        yield running


def ask(hub: HubServer, repository: str = REPOSITORY, name: str = NAME) -> HubFile:
    return hub_file(hub.url, repository, name, HINT)


def test_a_file_is_named_by_commit_and_hash_also_by_a_renamed_repository(hub):
    expected = f"{hub.url}/{REPOSITORY}/resolve/{COMMIT}/{NAME}"
    assert ask(hub) == HubFile(expected, COMMIT, sha256(DATA).hexdigest())
    assert hub.requests == [("HEAD", f"/{REPOSITORY}/resolve/main/{NAME}", None)]  # no bytes yet
    assert hub_file(f"{hub.url}/", REPOSITORY, NAME, HINT) == ask(hub)
    hub.renamed["timm/old"] = REPOSITORY
    assert ask(hub, "timm/old").sha256 == sha256(DATA).hexdigest()


def test_what_is_a_pickle_or_not_for_everybody_or_a_circle_is_refused(hub):
    hub.renamed["timm/old"] = "timm/old"
    waits: list[float] = []
    with pytest.raises(DownloadError, match="moved more than 3 times"):
        hub_file(hub.url, "timm/old", NAME, HINT, waits.append)
    hub.files = {f"{REPOSITORY}/pytorch_model.bin": DATA}
    with pytest.raises(DownloadError, match=rf"{REPOSITORY} at .* has no {NAME}: .* a pickle"):
        ask(hub)
    hub.gated.add(REPOSITORY)
    with pytest.raises(DownloadError, match=rf"answers 401: there is no .* is private; {HINT}"):
        ask(hub)


@pytest.mark.parametrize("header", ["x_linked_etag", "x_repo_commit"])
def test_a_server_that_tells_no_hash_is_none(hub, header):
    hub.withheld.add(header)
    with pytest.raises(DownloadError, match=f"the sha256 of the file.* cannot be checked; {HINT}"):
        ask(hub)


def test_a_hash_of_another_kind_is_none(hub):
    hub.told_sha256 = "a" * 40  # of git, for files that are not large
    with pytest.raises(DownloadError, match="cannot be checked"):
        ask(hub)


def test_a_hub_that_is_not_there_is_asked_four_times():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        waits: list[float] = []
        with pytest.raises(DownloadError, match=rf"cannot reach {url}/.*; {HINT}"):
            hub_file(url, REPOSITORY, NAME, HINT, waits.append)
    assert waits == [1, 2, 4]
