"""``tandem bench`` against a server of the test's: real load, real processes, short runs."""

import json
import re
import threading
from itertools import count

import pytest

from app.bench.load import NothingToClassifyError
from app.cli.bench import numbers
from app.errors import ConfigError
from calibration.offline import Setup, setups
from models.files import ResultFileError
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.http_server import FakeServer
from tests.support.tiny_networks import picture, write_tiny_set

TOO_LARGE = "give a number below a million"


@pytest.fixture
def server():
    with FakeServer() as fake:
        fake.get = (200, b'{"ready": true, "model_set": "fake"}')
        yield fake


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for color in ("red", "green", "blue"):
        (folder / f"{color}.png").write_bytes(picture(color))
    return folder


def bench(*arguments):
    return tandem("bench", *arguments)


def result_of(*arguments: object) -> dict:
    done = bench(*arguments, "--json", "-")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_closed_and_open_loops_send_every_photo_in_turn(server, photos):
    load = ("--concurrency", "2", "--rate", "40", "--duration", "0.5", "--warm-up", "0")
    result = result_of("--url", server.url, "--images", photos, *load)
    closed, opened = result["runs"]
    assert (closed["kind"], opened["kind"]) == ("closed", "open")
    assert closed["num_ok"] == closed["num_requests"] > 2
    assert 5 < opened["num_requests"] < 50
    assert opened["errors"] == {}
    assert result["num_images"] == 3
    sent = [body for path, body in server.requests if path.startswith("/v1/classify")]
    assert set(sent) == {path.read_bytes() for path in photos.iterdir()}
    assert closed["client_cpu_ms"] > 0
    assert closed["service_cpu_ms"] is None  # no tandem serve listens there


def test_loopback_is_loaded_without_a_proxy(server, proxy):
    load = ("--concurrency", "2", "--duration", "0.2", "--warm-up", "0")
    (run,) = result_of("--url", server.url, *load)["runs"]
    assert run["num_ok"] > 0
    assert proxy.requests == []


def test_a_form_holds_so_many_photos(server, photos):
    load = ("--concurrency", "1", "--files", "4", "--duration", "0.3", "--warm-up", "0")
    result = result_of("--url", server.url, "--images", photos, *load)
    (run,) = result["runs"]
    assert result["files_per_request"] == 4
    assert run["images_per_s"] == pytest.approx(4 * run["throughput"], abs=0.03)
    bodies = [body for path, body in server.requests if path.startswith("/v1/classify")]
    contents = [path.read_bytes() for path in sorted(photos.iterdir())]
    for body in bodies:  # four of three photos: one comes twice
        assert sum(body.count(content) for content in contents) == 4
        assert all(content in body for content in contents)


def test_no_more_than_the_clients_are_under_way(server):
    under_way, highest, lock = 0, 0, threading.Lock()
    numbers, all_three = count(), threading.Barrier(3, timeout=60)

    def answer(_: bytes) -> tuple[int, bytes]:
        nonlocal under_way, highest
        with lock:
            under_way += 1
            highest = max(highest, under_way)
            is_first = next(numbers) < 3
        if is_first:
            all_three.wait()  # one after the other they would wait for ever
        with lock:
            under_way -= 1
        return 200, b"{}"

    server.answer = answer
    result_of("--url", server.url, "--concurrency", "3", "--duration", "0.4", "--warm-up", "0")
    assert highest == 3


def test_errors_are_counted_by_kind(server):
    numbers = count()
    server.answer = lambda _: (200, b"{}") if next(numbers) % 2 else (429, b"{}")
    load = ("--concurrency", "1", "--duration", "0.3", "--warm-up", "0")
    (run,) = result_of("--url", server.url, *load)["runs"]
    assert run["errors"]["http_429"] == pytest.approx(run["num_ok"], abs=1)


def test_nothing_answered_is_exit_code_1(server):
    server.answer = lambda _: (503, b"{}")
    load = ("--concurrency", "1", "--duration", "0.2", "--warm-up", "0")
    done = bench("--url", server.url, *load)
    assert done.exit_code == 1
    assert "http_503" in done.stdout
    assert "no request was answered" in done.output


def test_a_rate_that_nothing_can_serve_ends_and_says_so(server):
    release = threading.Event()
    busy = threading.Lock()

    def one_at_a_time(_: bytes) -> tuple[int, bytes]:
        with busy:
            release.wait(0.02)
        return 200, b"{}"

    server.answer = one_at_a_time
    done = bench("--url", server.url, "--rate", "300", "--duration", "0.4", "--warm-up", "0")
    assert done.exit_code == 0
    assert "300/s is more than the service can do" in done.stdout


def test_the_plot_is_drawn(server, tmp_path):
    load = ("--rate", "20,40", "--duration", "0.3", "--warm-up", "0")
    assert bench("--url", server.url, *load, "--plot", tmp_path / "x.svg").exit_code == 0
    drawn = (tmp_path / "x.svg").read_text()
    texts = set(re.findall("<!-- (.*?) -->", drawn))
    assert {"offered requests/s", "20", "40", "p99", "objective: 100 ms"} <= texts
    assert "mathdefault" not in drawn  # of 2 x 10^1, as the axis said it


@cases(
    "arguments, kind, says",
    ("--plot x.txt", ConfigError, "a name that ends with .png or .svg"),
    ("--limit --plot x.png", ConfigError, "--limit has none"),
    ("--json /no/such/folder/x.json", ResultFileError, "cannot write"),
    ("--images .", NothingToClassifyError, ""),
    ("--url 127.0.0.1:8790", ConfigError, "write http://127.0.0.1:8790"),
    ("--rate nan", ConfigError, "--rate 'nan': give numbers above 0"),
    ("--rate 0", ConfigError, "--rate '0': give numbers above 0"),
    ("--concurrency x", ConfigError, "--concurrency 'x' is not a list of numbers"),
    ("--duration inf", ConfigError, f"--duration is inf: {TOO_LARGE}"),
    ("--duration 1e300", ConfigError, f"--duration is 1e+300: {TOO_LARGE}"),
    ("--warm-up inf", ConfigError, f"--warm-up is inf: {TOO_LARGE}"),
    ("--warm-up 1e300", ConfigError, f"--warm-up is 1e+300: {TOO_LARGE}"),
    ("--objective-ms inf", ConfigError, f"--objective-ms is inf: {TOO_LARGE}"),
    ("--objective-ms 1e300", ConfigError, f"--objective-ms is 1e+300: {TOO_LARGE}"),
)
def test_what_is_refused_before_the_load(server, tmp_path, monkeypatch, arguments, kind, says):
    monkeypatch.chdir(tmp_path)
    done = bench("--url", server.url, *arguments.split())
    assert isinstance(done.exception, kind)
    assert says in done.exception.message
    assert [path for path, _ in server.requests if path.startswith("/v1/classify")] == []


def test_nobody_there_or_not_ready_is_said(free_port, server):
    done = bench("--url", f"http://127.0.0.1:{free_port()}")
    assert isinstance(done.exception, ConfigError)
    assert "start one with tandem serve" in str(done.exception)
    server.get = (503, b"{}")
    assert "no Tandem is ready" in str(bench("--url", server.url).exception)


def test_the_limit_of_a_tiny_set(tmp_path, photos):
    folder = write_tiny_set(tmp_path / "tiny")
    short = ("--duration", "0.1")
    result = result_of("--limit", "--model-set", folder, "--images", photos, *short)
    limit = result["limit"]
    assert limit["images_per_s"] == max(row["images_per_s"] for row in limit["setups"])
    assert limit["latency_ms"] > 0
    assert result["num_images"] == 3


def test_setups_use_every_core_once():
    for cores in (1, 2, 3, 8, 12, 64):
        found = setups(cores)
        assert all(setup.streams * setup.threads == cores for setup in found)
        assert len(set(found)) == len(found)
    assert Setup(8, 2, 1) in setups(2)


def test_a_service_with_keys(server, photos, tmp_path):
    key = tmp_path / "key"
    key.write_text("k" * 32)
    load = ("--concurrency", "1", "--duration", "0.2", "--warm-up", "0", "--key-file", key)
    done = bench("--url", server.url, "--images", photos, *load, "--json", "-")
    assert done.exit_code == 0, done.output
    ready, *others = server.keys
    assert ready is None
    assert set(others) == {f"Bearer {'k' * 32}"}
    assert "kkkk" not in done.output


def test_lists_of_numbers():
    assert numbers("1,8,32", "--concurrency", whole=True) == [1, 8, 32]
    assert numbers("0.5", "--rate") == [0.5]


@pytest.mark.parametrize("text", ["", "a", "1,,2", "nan", "inf", "-1", "0", "1e7"])
def test_lists_that_are_none(text):
    with pytest.raises(ConfigError, match="--rate"):
        numbers(text, "--rate")
    with pytest.raises(ConfigError, match="whole numbers"):
        numbers("1.5", "--concurrency", whole=True)
