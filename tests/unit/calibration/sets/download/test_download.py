"""Downloads from a real server: whole or not at all, and what a refusal says."""

import pytest

from calibration.sets import download as module
from calibration.sets.download import NUM_TRIES, DownloadError, check_hash, download
from tests.support.calibration import file_server as server
from tests.support.calibration.downloaded import DATA, PREFIX, names


def test_a_file_arrives_whole_and_its_progress_is_told(files, path, waits):
    told: list[tuple[int, int | None]] = []
    found = download(files.url, path, PREFIX, lambda *seen: told.append(seen), waits.append)
    assert found == path
    assert path.read_bytes() == DATA
    assert names(path) == ["net.pth"]
    assert told[-1] == (len(DATA), len(DATA))
    assert [there for there, _ in told] == sorted({there for there, _ in told})
    assert files.ranges == [None]
    assert waits == []


def test_what_is_there_is_not_fetched_again(files, path):
    path.parent.mkdir()
    path.write_bytes(DATA)
    assert download(files.url, path, PREFIX) == path
    assert files.requests == []


def test_a_file_that_was_damaged_since_is_fetched_again(files, path):
    path.parent.mkdir()
    path.write_bytes(DATA[:-1] + b"?")
    download(files.url, path, PREFIX)
    assert path.read_bytes() == DATA
    assert names(path) == ["net.pth"]


@pytest.mark.parametrize("code", [401, 403, 404])
def test_a_refusal_is_final(files, path, waits, code):
    files.script = [server.status(code)]
    with pytest.raises(DownloadError, match=rf"net\.pth answers {code}; .*--mirror URL"):
        download(files.url, path, PREFIX, wait=waits.append)
    assert len(files.requests) == 1
    assert names(path) == []


def test_a_server_in_trouble_is_asked_again(files, path, waits):
    """Or one that is asked too often, as the Hugging Face hub says by 429."""
    files.script = [server.status(500), server.status(429), server.status(503), server.ranged]
    download(files.url, path, PREFIX, wait=waits.append)
    assert path.read_bytes() == DATA
    assert waits == [1, 2, 4]


def test_a_server_that_stays_in_trouble_is_given_up(files, path, waits):
    files.script = [server.status(502)]
    with pytest.raises(DownloadError, match="answers 502"):
        download(files.url, path, PREFIX, wait=waits.append)
    assert len(files.requests) == NUM_TRIES
    assert names(path) == []


def test_another_file_under_the_name_is_not_kept(files, path):
    files.data = b"<html>log in here</html>"
    with pytest.raises(DownloadError, match=rf"net\.pth was altered .* must begin {PREFIX}"):
        download(files.url, path, PREFIX)
    assert names(path) == []


@pytest.mark.parametrize("answer", [server.whole, server.chunked])
def test_a_file_over_the_limit_is_refused_and_leaves_nothing(files, path, monkeypatch, answer):
    monkeypatch.setattr(module, "MAX_BYTES", 200_000)
    files.script = [answer]
    with pytest.raises(DownloadError, match="200000 is the limit"):
        download(files.url, path, PREFIX)
    assert len(files.requests) == 1
    assert names(path) == []


def test_an_announced_size_over_the_limit_is_refused_before_it_is_fetched(files, path, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 200_000)
    told: list[int] = []
    with pytest.raises(DownloadError, match="has 300000 bytes or more"):
        download(files.url, path, PREFIX, lambda there, _: told.append(there))
    assert told == []


def test_a_file_without_a_length_arrives_too(files, path):
    files.script = [server.chunked]
    totals: set[int | None] = set()
    download(files.url, path, PREFIX, lambda _, total: totals.add(total))
    assert path.read_bytes() == DATA
    assert totals == {None}


def test_nobody_there_says_what_to_try(path, waits, free_port):
    with pytest.raises(DownloadError) as caught:
        download(f"http://127.0.0.1:{free_port()}/net.pth", path, PREFIX, wait=waits.append)
    assert "cannot reach http://127.0.0.1" in caught.value.message
    assert "ConnectError" in caught.value.message
    for advice in ("HTTPS_PROXY", "--mirror URL", "fetch net.pth elsewhere", "--weights-dir DIR"):
        assert advice in caught.value.message
    assert waits == [1, 2, 4]


@pytest.mark.parametrize("url", ["", "net.pth", "ftp://127.0.0.1/net.pth", "http://[/net.pth"])
def test_an_address_that_is_none(path, waits, url):
    with pytest.raises(DownloadError, match="cannot reach"):
        download(url, path, PREFIX, wait=waits.append)


@pytest.mark.parametrize(
    ("name", "value"),
    [("HTTP_PROXY", "quic://127.0.0.1:1"), ("SSL_CERT_FILE", "/nowhere/certificates.pem")],
)
def test_an_environment_that_cannot_be_used_is_named(files, path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(DownloadError, match="environment names cannot be used"):
        download(files.url, path, PREFIX)


def test_a_proxy_is_taken_from_the_environment(files, path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", files.url.removesuffix("/net.pth"))
    download("http://weights.example/net.pth", path, PREFIX)
    assert files.requests == [("http://weights.example/net.pth", None)]
    assert path.read_bytes() == DATA


def test_a_place_that_is_no_folder(files, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DownloadError, match="choose another place"):
        download(files.url, tmp_path / "cache" / "net.pth", PREFIX)
    assert files.requests == []


def test_a_file_of_ones_own_is_checked_but_never_removed(tmp_path):
    own = tmp_path / "net.pth"
    own.write_bytes(DATA)
    check_hash(own, PREFIX)
    with pytest.raises(DownloadError, match="must begin 01234567"):
        check_hash(own, "01234567")
    assert own.read_bytes() == DATA
    with pytest.raises(DownloadError, match=r"cannot read .*other\.pth: No such file"):
        check_hash(tmp_path / "other.pth", PREFIX)
