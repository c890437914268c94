"""A download that broke off goes on where it was."""

import pytest

from calibration.sets import download as module
from calibration.sets.download import NUM_TRIES, DownloadError, download
from tests.support.calibration import file_server as server
from tests.support.calibration.downloaded import DATA, PREFIX, names
from tests.support.full_disk import full_disk


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
