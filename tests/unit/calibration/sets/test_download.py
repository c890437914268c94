"""Downloads from a real server: whole or not at all, and what a refusal says.

A download that broke off goes on where it was.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from calibration.sets import download as module
from calibration.sets.download import NUM_TRIES, DownloadError, check_hash, download
from tests.support.calibration import file_server as server
from tests.support.calibration.downloaded import DATA, PREFIX, names
from tests.support.calibration.file_server import FileServer
from tests.support.full_disk import full_disk

pytestmark = pytest.mark.usefixtures("no_proxy")


@pytest.fixture
def files() -> Iterator[FileServer]:
    with FileServer(DATA) as running:
        yield running


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cache" / "net.pth"


@pytest.fixture
def part(path) -> Path:
    """The file's place while it is fetched; its folder is there."""
    path.parent.mkdir()
    return path.with_name("net.pth.part")


@pytest.fixture
def waits() -> list[float]:
    return []


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


def test_a_broken_download_goes_on_where_it_was(files, path, part):
    part.write_bytes(DATA[:123_456])
    told: list[tuple[int, int | None]] = []
    download(files.url, path, PREFIX, lambda *seen: told.append(seen))
    assert files.ranges == ["bytes=123456-"]
    assert path.read_bytes() == DATA
    assert told[0][0] > 123_456
    assert told[-1] == (len(DATA), len(DATA))


def test_a_server_without_ranges_sends_it_from_the_start(files, path, part):
    part.write_bytes(DATA[:1000])
    files.script = [server.whole]
    told: list[tuple[int, int | None]] = []
    download(files.url, path, PREFIX, lambda *seen: told.append(seen))
    assert path.read_bytes() == DATA
    assert told[-1] == (len(DATA), len(DATA))


def test_a_server_that_breaks_off_is_asked_for_the_rest(files, path, waits):
    files.script = [server.breaks_off(100_000), server.breaks_off(50_000), server.ranged]
    download(files.url, path, PREFIX, wait=waits.append)
    assert path.read_bytes() == DATA
    assert files.ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert waits == [1, 2]


def test_a_server_that_always_breaks_off_is_given_up_but_not_what_came(files, path, waits):
    files.script = [server.breaks_off(10_000)]
    with pytest.raises(DownloadError, match=r"cannot reach .*/net\.pth .*--weights-dir"):
        download(files.url, path, PREFIX, wait=waits.append)
    assert len(files.requests) == NUM_TRIES
    assert len(waits) == NUM_TRIES - 1
    assert names(path) == ["net.pth.part"]
    assert path.with_name("net.pth.part").read_bytes() == DATA[: 10_000 * NUM_TRIES]


def test_a_resumed_file_that_does_not_fit_together_is_not_kept(files, path, part):
    part.write_bytes(b"x" * 1000)
    with pytest.raises(DownloadError, match="was altered"):
        download(files.url, path, PREFIX)
    assert names(path) == []
    download(files.url, path, PREFIX)
    assert path.read_bytes() == DATA


def test_the_limit_holds_for_a_resumed_file_as_a_whole(files, path, part, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 200_000)
    part.write_bytes(DATA[:150_000])
    with pytest.raises(DownloadError, match="has 300000 bytes or more"):
        download(files.url, path, PREFIX)
    assert names(path) == []


def test_redirects_are_followed_and_resumed(files, path, part):
    part.write_bytes(DATA[:1000])
    files.script = [server.redirect]
    download(files.url, path, PREFIX)
    assert path.read_bytes() == DATA
    assert files.requests == [("/net.pth", "bytes=1000-"), ("/elsewhere", "bytes=1000-")]


def test_a_full_disk_says_so_and_the_next_try_goes_on(files, path, waits):
    with (
        full_disk(100_000),
        pytest.raises(DownloadError, match=r"cannot write .*net\.pth\.part: File too large; make"),
    ):
        download(files.url, path, PREFIX, wait=waits.append)
    assert waits == []
    assert names(path) == ["net.pth.part"]
    download(files.url, path, PREFIX)
    assert files.ranges == [None, "bytes=100000-"]
    assert path.read_bytes() == DATA


def test_a_part_that_is_all_of_it_is_taken(files, path, part):
    part.write_bytes(DATA)
    download(files.url, path, PREFIX)
    assert path.read_bytes() == DATA
    assert files.ranges == [f"bytes={len(DATA)}-"]
    assert names(path) == ["net.pth"]


def test_a_part_longer_than_the_file_is_thrown_away(files, path, part, waits):
    part.write_bytes(DATA + b"more")
    download(files.url, path, PREFIX, wait=waits.append)
    assert path.read_bytes() == DATA
    assert files.ranges == [f"bytes={len(DATA) + 4}-", None]


def test_a_server_that_has_no_range_at_all_is_given_up(files, path, waits):
    files.script = [server.status(416)]
    with pytest.raises(DownloadError, match="the file there is another one now"):
        download(files.url, path, PREFIX, wait=waits.append)


def test_ctrl_c_leaves_only_the_part_and_the_next_try_goes_on(files, path):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(files.url, path, PREFIX, interrupt)
    assert names(path) == ["net.pth.part"]
    got = path.with_name("net.pth.part").read_bytes()
    assert 0 < len(got) < len(DATA)
    assert DATA.startswith(got)
    download(files.url, path, PREFIX)
    assert files.ranges == [None, f"bytes={len(got)}-"]
    assert path.read_bytes() == DATA
