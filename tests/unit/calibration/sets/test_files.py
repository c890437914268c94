"""Downloads from a real server; the process that loads a PyTorch file, and how its end is said.

A download is whole, goes on where it broke off, or leaves nothing. None of these tests needs torch:
the processes are stand-ins. Real files are in test_pytorch_child.py.
"""

import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import psutil
import pytest

from calibration.sets import files as module
from calibration.sets.files import (
    NUM_TRIES,
    DownloadError,
    check_hash,
    converted,
    download,
    kind_of,
)
from models import machine
from models.errors import ModelSetError
from models.machine import MissingExtraError
from tests.support import children
from tests.support.cases import cases
from tests.support.full_disk import full_disk
from tests.support.http_server import QuietRequest, ThreadedServer
from tests.support.script_files import pickled_attack

SCRIPT = ("net/data.pkl", "net/constants.pkl", "net/code/__torch__.py", "net/version")
PROGRAM = ("net/archive_format", "net/models/model.json", "net/data/sample_inputs/model.pt")
CHECKPOINT = ("net/data.pkl", "net/data/0", "net/version")
Ends = Callable[[str], None]
DATA = np.random.default_rng(1).bytes(300_000)
PREFIX = sha256(DATA).hexdigest()[:8]


def archive(path, names=SCRIPT, content=b""):
    with zipfile.ZipFile(path, "w") as out:
        for name in names:
            out.writestr(name, content)
    return path


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Let the child run other code; its argument is the task."""
    monkeypatch.setattr(machine, "find_spec", lambda name: name)

    def with_code(code: str) -> None:
        monkeypatch.setattr(module, "convert_here", partial(children.runs, code))

    return with_code


def convert(path, limit_s=60.0):
    with converted(path, "openvino", None, None, is_trusted=True, limit_s=limit_s) as made:
        return made.read_bytes()


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files, in which nothing may stay."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_kinds_are_told_by_what_is_inside(tmp_path):
    assert kind_of(archive(tmp_path / "a.pt")) == "script"
    assert kind_of(archive(tmp_path / "b.pt", PROGRAM)) == "program"
    assert kind_of(archive(tmp_path / "c.pt2", PROGRAM)) == "program"


@cases(
    "names, says",
    (CHECKPOINT, "is a checkpoint of torch.save: weights.*torch.export.save"),
    (("readme.txt",), "is a ZIP archive, and no network of PyTorch"),
)
def test_archives_that_are_no_network(tmp_path, names, says):
    with pytest.raises(ModelSetError, match=says):
        convert(archive(tmp_path / "net.pt", names))


def test_a_pickle_is_never_loaded(tmp_path):
    (tmp_path / "net.pt").write_bytes(pickled_attack(tmp_path / "it-ran"))
    with pytest.raises(ModelSetError, match=r"is a pickle of torch\.save.*torch\.export\.save"):
        convert(tmp_path / "net.pt")
    with pytest.raises(ModelSetError, match=r"cannot read .*: No such file"):
        convert(tmp_path / "nothing.pt")
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("names", [SCRIPT, PROGRAM])
def test_without_trust_no_process_starts(tmp_path, names, monkeypatch):
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(module, "run_apart", started)
    path = archive(tmp_path / "net.pt2", names)
    says = r"net\.pt2 is a PyTorch file, and to load it is to run code that it holds.*--trust"
    with (
        pytest.raises(ModelSetError, match=says),
        converted(path, "openvino", None, None, is_trusted=False),
    ):
        pass


def test_torch_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"net\.pt needs torch.*'tandem-serve\[torch\]'"):
        convert(archive(tmp_path / "net.pt"))


def test_what_the_process_made_is_there_while_the_block_lasts(tmp_path, ends, temporary):
    ends("arguments[0].made.write_text('made')")
    assert convert(archive(tmp_path / "net.pt")) == b"made"
    assert list(temporary.iterdir()) == []


@cases(
    "code, says",
    ("import os; os.kill(os.getpid(), 11)", r"died \(SIGSEGV; it said nothing\)"),
    ("import os; os.kill(os.getpid(), 9)", r"died \(SIGKILL: memory ran out"),
    ("raise ValueError('of the file')", r"died \(exit code 1; ValueError: of the file\)"),
    ("import os; os._exit(0)", r"died \(exit code 0; it said nothing\)"),
    (
        "print('\\x1b[2J all is well', flush=True); import os; os.abort()",
        r"SIGABRT; \[2J all is well\)",
    ),
    ("from models.errors import ModelSetError as No; raise No('no classifier')", "^no class"),
    ids=["segfault", "killed", "raises", "ends", "aborts", "says"],
)
def test_a_process_that_dies_is_an_error_of_one_line(tmp_path, ends, temporary, code, says):
    ends(code)
    with pytest.raises(ModelSetError, match=says) as failed:
        convert(archive(tmp_path / "net.pt"))
    assert "\n" not in failed.value.message
    assert list(temporary.iterdir()) == []


def test_a_process_that_does_not_end_is_given_up(tmp_path, ends, temporary):
    ends(children.SLEEPS)
    of_other_tests = psutil.Process().children()
    with pytest.raises(ModelSetError, match=r"was not converted within 0\.5 s, and was given up"):
        convert(archive(tmp_path / "net.pt"), limit_s=0.5)
    assert set(psutil.Process().children()) <= set(of_other_tests)
    assert list(temporary.iterdir()) == []


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


class Request(QuietRequest):
    """One request, and the ways to answer it."""

    protocol_version = "HTTP/1.1"
    files: "FileServer"

    def do_GET(self) -> None:
        self.close_connection = True
        self.files.requests.append((self.path, self.headers.get("range")))
        script = self.files.script
        (script.pop(0) if len(script) > 1 else script[0])(self)


Answer = Callable[[Request], None]


class FileServer(ThreadedServer):
    """Answers the requests with ``script``, in order, its last entry again and again."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.script: list[Answer] = [ranged]
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        super().__init__(type("Handler", (Request,), {"files": self}))
        self.url += "/net.pth"

    @property
    def ranges(self) -> list[str | None]:
        return [header for _, header in self.requests]


def _start(request: Request) -> int:
    return int(request.headers.get("range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))


def ranged(request: Request) -> None:
    """Answer as a good server does."""
    data, start = request.files.data, _start(request)
    if start == 0:
        request.send(200, data)
    elif start >= len(data):
        request.send(416, b"", content_range=f"bytes */{len(data)}")
    else:
        request.send(206, data[start:], content_range=f"bytes {start}-{len(data) - 1}/{len(data)}")


def whole(request: Request) -> None:
    """Know no ranges."""
    request.send(200, request.files.data)


def status(code: int) -> Answer:
    return lambda request: request.send(code, b"an error page")


def breaks_off(after: int) -> Answer:
    """Promise the rest of the file and send ``after`` bytes of it."""

    def answer(request: Request) -> None:
        rest = request.files.data[_start(request) :]
        code = 206 if "range" in request.headers else 200
        request.send(code, rest[:after], content_length=str(len(rest)))

    return answer


def chunked(request: Request) -> None:
    """Send no length."""
    request.send_response(200)
    request.send_header("transfer-encoding", "chunked")
    request.end_headers()
    data = request.files.data
    for start in range(0, len(data), 10_000):
        part = data[start : start + 10_000]
        request.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
    request.wfile.write(b"0\r\n\r\n")


def redirect(request: Request) -> None:
    """Send elsewhere what is asked for at ``/net.pth``."""
    if request.path == "/net.pth":
        request.send(302, b"", location="/elsewhere")
    else:
        ranged(request)


pytestmark = pytest.mark.usefixtures("no_proxy")


@pytest.fixture
def files():
    with FileServer(DATA) as running:
        yield running


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "net.pth"


@pytest.fixture
def part(path):
    """The file's place while it is fetched; its folder is there."""
    path.parent.mkdir()
    return path.with_name("net.pth.part")


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def told() -> list[tuple[int, int | None]]:
    """The reports of progress: bytes that are there, and the total."""
    return []


@pytest.fixture
def fetch(files, path, waits, told):
    return lambda: download(files.url, path, PREFIX, lambda *seen: told.append(seen), waits.append)


def test_a_file_arrives_whole_and_its_progress_is_told(files, path, fetch, waits, told):
    assert fetch() == path
    assert (path.read_bytes(), names(path)) == (DATA, ["net.pth"])
    assert told[-1] == (len(DATA), len(DATA))
    assert [there for there, _ in told] == sorted({there for there, _ in told})
    assert (files.ranges, waits) == ([None], [])


@pytest.mark.parametrize(("there", "num_requests"), [(DATA, 0), (DATA[:-1] + b"?", 1)])
def test_what_is_there_is_fetched_again_only_if_it_was_damaged(
    files, path, fetch, there, num_requests
):
    path.parent.mkdir()
    path.write_bytes(there)
    assert fetch() == path
    assert len(files.requests) == num_requests
    assert (path.read_bytes(), names(path)) == (DATA, ["net.pth"])


@cases(
    "code, num_requests, says",
    *((code, 1, rf"net\.pth answers {code}; .*--mirror URL") for code in (401, 403, 404)),
    (502, NUM_TRIES, "answers 502"),
    (416, NUM_TRIES, "the file there is another one now"),  # no range at all
)
def test_a_refusal_is_final_and_trouble_is_given_up(files, path, fetch, code, num_requests, says):
    files.script = [status(code)]
    with pytest.raises(DownloadError, match=says):
        fetch()
    assert len(files.requests) == num_requests
    assert names(path) == []


def test_a_server_in_trouble_is_asked_again(files, path, fetch, waits):
    """Or one that is asked too often, as the Hugging Face hub says by 429."""
    files.script = [status(500), status(429), status(503), ranged]
    fetch()
    assert (path.read_bytes(), waits) == (DATA, [1, 2, 4])


def test_another_file_under_the_name_is_not_kept(files, path, fetch):
    files.data = b"<html>log in here</html>"
    with pytest.raises(DownloadError, match=rf"net\.pth was altered .* must begin {PREFIX}"):
        fetch()
    assert names(path) == []


@cases(
    "answer, num_there, says",
    (whole, 0, "200000 is the limit"),
    (chunked, 0, "200000 is the limit"),
    (ranged, 0, "has 300000 bytes or more"),  # announced: before it is fetched
    (ranged, 150_000, "has 300000 bytes or more"),  # resumed: the file as a whole
)
def test_a_file_over_the_limit_is_refused_and_leaves_nothing(
    files, path, part, fetch, told, monkeypatch, answer, num_there, says
):
    monkeypatch.setattr(module, "MAX_BYTES", 200_000)
    if num_there:
        part.write_bytes(DATA[:num_there])
    files.script = [answer]
    with pytest.raises(DownloadError, match=says):
        fetch()
    assert len(files.requests) == 1
    assert answer is chunked or told == []
    assert names(path) == []


def test_a_file_without_a_length_arrives_too(files, path, fetch, told):
    files.script = [chunked]
    fetch()
    assert path.read_bytes() == DATA
    assert {total for _, total in told} == {None}


def test_nobody_there_says_what_to_try(path, waits, free_port):
    with pytest.raises(DownloadError) as caught:
        download(f"http://127.0.0.1:{free_port()}/net.pth", path, PREFIX, wait=waits.append)
    for part_of_it in (
        *("cannot reach http://127.0.0.1", "ConnectError", "HTTPS_PROXY", "--mirror URL"),
        *("fetch net.pth elsewhere", "--weights-dir DIR"),
    ):
        assert part_of_it in caught.value.message
    assert waits == [1, 2, 4]


@pytest.mark.parametrize("url", ["", "net.pth", "ftp://127.0.0.1/net.pth", "http://[/net.pth"])
def test_an_address_that_is_none(path, waits, url):
    with pytest.raises(DownloadError, match="cannot reach"):
        download(url, path, PREFIX, wait=waits.append)


@pytest.mark.parametrize(
    ("name", "value"),
    [("HTTP_PROXY", "quic://127.0.0.1:1"), ("SSL_CERT_FILE", "/nowhere/certificates.pem")],
)
def test_an_environment_that_cannot_be_used_is_named(fetch, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(DownloadError, match="environment names cannot be used"):
        fetch()


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


@cases(
    "there, script, ranges",
    (DATA[:123_456], ranged, ["bytes=123456-"]),
    (DATA[:1000], whole, ["bytes=1000-"]),  # a server without ranges sends all
    (DATA[:1000], redirect, ["bytes=1000-", "bytes=1000-"]),
    (DATA, ranged, [f"bytes={len(DATA)}-"]),
    (DATA + b"more", ranged, [f"bytes={len(DATA) + 4}-", None]),  # thrown away
    ids=["goes on", "no ranges", "redirect", "all of it", "too long"],
)
def test_a_part_that_is_there_is_used(files, path, part, fetch, told, there, script, ranges):
    part.write_bytes(there)
    files.script = [script]
    fetch()
    assert (path.read_bytes(), names(path)) == (DATA, ["net.pth"])
    assert files.ranges == ranges
    if script is redirect:
        assert [place for place, _ in files.requests] == ["/net.pth", "/elsewhere"]
    if there == DATA[:123_456]:
        assert told[0][0] > 123_456
    assert there == DATA or told[-1] == (len(DATA), len(DATA))


def test_a_server_that_breaks_off_is_asked_for_the_rest(files, path, fetch, waits):
    files.script = [breaks_off(100_000), breaks_off(50_000), ranged]
    fetch()
    assert path.read_bytes() == DATA
    assert files.ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert waits == [1, 2]


def test_a_server_that_always_breaks_off_is_given_up_but_not_what_came(files, path, fetch, waits):
    files.script = [breaks_off(10_000)]
    with pytest.raises(DownloadError, match=r"cannot reach .*/net\.pth .*--weights-dir"):
        fetch()
    assert (len(files.requests), len(waits)) == (NUM_TRIES, NUM_TRIES - 1)
    assert names(path) == ["net.pth.part"]
    assert path.with_name("net.pth.part").read_bytes() == DATA[: 10_000 * NUM_TRIES]


def test_a_resumed_file_that_does_not_fit_together_is_not_kept(path, part, fetch):
    part.write_bytes(b"x" * 1000)
    with pytest.raises(DownloadError, match="was altered"):
        fetch()
    assert names(path) == []
    fetch()
    assert path.read_bytes() == DATA


def test_a_full_disk_says_so_and_the_next_try_goes_on(files, path, fetch, waits):
    says = r"cannot write .*net\.pth\.part: File too large; make"
    with full_disk(100_000), pytest.raises(DownloadError, match=says):
        fetch()
    assert (waits, names(path)) == ([], ["net.pth.part"])
    fetch()
    assert files.ranges == [None, "bytes=100000-"]
    assert path.read_bytes() == DATA


def test_ctrl_c_leaves_only_the_part_and_the_next_try_goes_on(files, path, fetch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(files.url, path, PREFIX, interrupt)
    assert names(path) == ["net.pth.part"]
    got = path.with_name("net.pth.part").read_bytes()
    assert 0 < len(got) < len(DATA)
    assert DATA.startswith(got)
    fetch()
    assert files.ranges == [None, f"bytes={len(got)}-"]
    assert path.read_bytes() == DATA
