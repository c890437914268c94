"""The service's log, its two forms and Serve's files; and the relay of metrics, on real sockets.

tests/e2e/test_notified.py has Ray's own agent behind the relay.
"""

import json
import logging
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from wsgiref import simple_server

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app, start_http_server

from app.access import KeyFile, Keys
from app.environment import PROGRAM, mark_own_lines
from app.errors import ConfigError
from app.launch import log_and_metrics as module
from app.launch.checks import free_port
from app.launch.fork_client import _show_metrics_at
from app.launch.log_and_metrics import (
    MAX_CONNECTIONS,
    ServeLogs,
    followed,
    logger,
    metrics_relay,
    service_log,
    take_over_rays_lines,
)
from tests.support.cases import cases

ELSEWHERE = "127.0.0.2"  # an address of this machine that Ray's agent does not listen on
NOBODYS, KEY = Keys(()), "k" * 32
QUICKLY_S = 2.0  # in which a scrape is answered, whatever others do
Address = tuple[str, int]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "session_2026-01-01" / "logs" / "serve"
    folder.mkdir(parents=True)
    return folder


def lines_of(capsys) -> list[dict]:
    """Return the lines that were written to stderr since the last call."""
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize(("is_a_tty", "expected"), [(True, "text"), (False, "json")])
def test_the_terminal_decides_unless_a_format_is_asked_for(monkeypatch, is_a_tty, expected):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_a_tty)
    with service_log(None) as log_format:
        assert log_format == expected
    for asked in ("json", "text"):
        with service_log(asked) as log_format:
            assert log_format == asked


def test_json_has_a_line_for_each_record(capsys):
    with service_log("json"):
        logger.info("ready at %s", "there", extra={"fields": {"port": 8000}})
        logger.warning('a "warning"\nof two lines')
        module.console.print("[bold]for people alone[/]")
    first, second = lines_of(capsys)
    assert (first["message"], first["levelname"], first["port"]) == ("ready at there", "INFO", 8000)
    assert second["message"] == 'a "warning"\nof two lines'


@pytest.mark.parametrize(
    ("error", "exit_code", "code"),
    [(ConfigError("no port"), 2, "config"), (KeyError("x"), 1, None)],
)
def test_an_error_is_the_last_line(capsys, error, exit_code, code):
    error.add_note("Ray's logs are in /tmp.")
    with pytest.raises(SystemExit) as ended, service_log("json"):
        raise error
    assert ended.value.code == exit_code
    (line,) = lines_of(capsys)
    assert (line["levelname"], line["code"]) == ("ERROR", code)
    assert line["message"].endswith("Ray's logs are in /tmp.")
    assert ("exc_text" in line) == (code is None)


def test_for_people_an_error_is_the_commands_and_a_closed_terminal_ends_nothing(monkeypatch):
    def closed(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(ConfigError), service_log("text"):
        raise ConfigError("no port")
    monkeypatch.setattr(module.console, "print", closed)
    with service_log("text"):
        logging.getLogger(module.__name__).warning("nobody reads this")
        module.ConsoleLines().emit(logging.makeLogRecord({"msg": "nor this"}))


def test_what_ray_logs_in_this_process_is_json_whatever_formatter_it_sets(capsys):
    serve = logging.getLogger("ray.serve")
    before = list(serve.handlers), list(logging.getLogger("ray").handlers)
    try:
        with service_log("json"):
            take_over_rays_lines()
            serve.handlers[0].setFormatter(logging.Formatter("text: %(message)s"))
            serve.warning("chmod 600 keys")
    finally:
        serve.handlers[:], logging.getLogger("ray").handlers[:] = before
    assert lines_of(capsys)[0]["message"] == "chmod 600 keys"


def serves(level: str, message: str, **more: object) -> str:
    return json.dumps({"asctime": "now", "levelname": level, "message": message, **more})


def test_serves_files_are_followed(capsys, logs):
    error = serves("ERROR", "request r1 failed", deployment="tandem_Gateway", request_id="r1")
    file, followed_logs = logs / "replica_tandem_Gateway_x.log", ServeLogs(logs.parents[2])
    with service_log("json"):
        file.write_text(f"{error}\n{error[:20]}")
        followed_logs.read_new()
        followed_logs.read_new()
        assert capsys.readouterr().err == f"{error}\n"  # as it is, once; half a line waits
        with file.open("a") as more:
            more.write(f"{error[20:]}\nWARNING in text\n")
        (logs / "controller_1.log").write_text(serves("WARNING", "Deploying") + "\n")
        followed_logs.read_new()
    lines = lines_of(capsys)
    messages = [line["message"] for line in lines]
    assert messages == ["Deploying", "request r1 failed", "WARNING in text"]
    assert lines[-1]["levelname"] == "WARNING"


def test_a_rotated_file_is_followed_to_its_end(capsys, logs):
    file, followed_logs = logs / "controller_1.log", ServeLogs(logs.parents[2])
    with service_log("json"):
        file.write_text(serves("INFO", "one", tandem=True) + "\n")
        followed_logs.read_new()
        with file.open("a") as more:
            more.write(serves("INFO", "two", tandem=True) + "\n")
        file.rename(logs / "controller_1.log.1")
        file.write_text(serves("INFO", "three", tandem=True) + "\n")
        followed_logs.read_new()
        followed_logs.read_new()
    assert sorted(line["message"] for line in lines_of(capsys)) == ["one", "three", "two"]


def test_what_came_last_is_read_at_the_end(capsys, logs, monkeypatch):
    """The thread never gets to look."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 3600)
    with service_log("json"), followed(logs.parents[2]):
        (logs / "controller_1.log").write_text(serves("WARNING", "late") + "\n")
    assert [line["message"] for line in lines_of(capsys)] == ["late"]


def test_for_people_stages_warnings_and_all_errors(logs, capsys):
    lines = [
        serves("INFO", "golden check passed", deployment="tandem_Gateway"),
        serves("WARNING", "spans are lost [really]", deployment="tandem_Gateway"),
        serves("WARNING", "on other nodes", component_name="controller"),
        serves("ERROR", "could not deploy", component_name="controller"),
    ]
    (logs / "all.log").write_text("\n".join(lines) + "\n")
    with service_log("text"):
        ServeLogs(logs.parents[2]).read_new()
    said = capsys.readouterr().err.splitlines()
    assert said == ["tandem_Gateway: spans are lost [really]", "controller: could not deploy"]


NEWS = (serves("INFO", "golden check passed", tandem=True), serves("INFO", "Started."))
RAYS = serves("WARNING", "a replica crashed", component_name="controller")
NO_PROBLEM = [
    serves("WARNING", "HTTPOptions.host='127.0.0.1' won't accept", component_name="controller"),
    serves("WARNING", "Failed to start server on port 30000. Retrying...", deployment="Gateway"),
]


@cases(
    "level, said",
    (None, ["golden check passed", "a replica crashed"]),
    ("warning", ["a replica crashed"]),
    ("error", []),
    ("debug", [*NEWS, RAYS, *NO_PROBLEM]),
)
def test_of_serves_own_lines_only_warnings_that_are_problems_are_shown(capsys, logs, level, said):
    lines = [*NEWS, RAYS, *NO_PROBLEM]
    (logs / "controller_1.log").write_text("\n".join(lines) + "\n")
    with service_log("json", level):
        ServeLogs(logs.parents[2]).read_new()
    expected = [json.loads(line)["message"] if line[0] == "{" else line for line in said]
    assert [line["message"] for line in lines_of(capsys)] == expected


def test_lines_of_this_program_are_marked_in_replicas(caplog):
    mark_own_lines()
    serve = logging.getLogger("ray.serve")
    try:
        for text, path in (("ours", f"{PROGRAM}stages/decoder.py"), ("of another", "/x.py")):
            exec(compile(f"log.warning({text!r})", path, "exec"), {"log": serve})
    finally:
        serve.filters.clear()
    marked = {record.getMessage(): hasattr(record, "tandem") for record in caplog.records}
    assert marked == {"ours": True, "of another": False}


def registry() -> CollectorRegistry:
    """Return one whose text fills the buffers between the relay and a client that reads nothing."""
    made = CollectorRegistry()
    Gauge("ray_tandem_queue_length", "of a test " + "x" * 2**22, registry=made).set(7)
    return made


@pytest.fixture
def source_port() -> Iterator[int]:
    """Return the port of metrics as Ray's agent has them: prometheus_client's server."""
    port = free_port()
    server, thread = start_http_server(port, "127.0.0.1", registry())
    yield port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def address(source_port: int) -> Iterator[Address]:
    with metrics_relay(*(place := (ELSEWHERE, free_port())), source_port, NOBODYS):
        yield place


def url_of(address: Address) -> str:
    return f"http://{address[0]}:{address[1]}/metrics"


def get(url: str, timeout: float = 30, **headers: str) -> httpx.Response:
    return httpx.get(url, timeout=timeout, trust_env=False, headers=headers)


def test_the_metrics_are_there_and_nothing_else(source_port: int) -> None:
    port = free_port()
    with metrics_relay(ELSEWHERE, port, source_port, NOBODYS) as url:
        assert url == f"http://{ELSEWHERE}:{port}/metrics"
        answer = get(url)
        assert answer.text == get(f"http://127.0.0.1:{source_port}/metrics").text
        assert "ray_tandem_queue_length 7.0" in answer.text
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert get(url.replace("/metrics", "/other")).status_code == 404
        assert httpx.post(url, trust_env=False).status_code == 405
    with pytest.raises(httpx.ConnectError):
        get(url)


@pytest.mark.parametrize("is_there", [True, False])
def test_ipv6_and_without_an_answer_of_the_agent_it_says_so(monkeypatch, tmp_path, is_there):
    """Prometheus calls its target down then, as it is."""
    monkeypatch.setattr(module, "SCRAPED_WITHIN_S", 0.1)
    with socket.socket(socket.AF_UNIX) as agent:
        if is_there:
            agent.bind(str(tmp_path / "agent"))
            agent.listen()
        with metrics_relay("::1", free_port(), tmp_path / "agent", NOBODYS) as url:
            assert url.startswith("http://[::1]:")
            answer = get(url)
    why = "none within 0.1 s" if is_there else "No such file or directory"
    assert (answer.status_code, answer.text) == (503, f"no metrics from Ray's agent: {why}\n")


def test_only_who_has_the_key_reads_them(source_port: int, tmp_path: Path) -> None:
    (file := tmp_path / "key").write_text(f"prometheus:{KEY}")
    file.chmod(0o600)
    with metrics_relay(ELSEWHERE, free_port(), source_port, Keys((), KeyFile(file))) as url:
        assert get(url, authorization=f"Bearer {KEY}").status_code == 200
        assert get(url.replace("/metrics", "/livez")).text == "tandem serve runs\n"
        for authorization in ("", f"Bearer {KEY[1:]}"):
            answer = get(url, authorization=authorization)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert "tandem" not in answer.text


@pytest.mark.parametrize(
    "sent", [b"", b"GET /metrics HTTP/1.1\r\nX: ", b"GET /metrics HTTP/1.1\r\n\r\n"]
)
def test_a_crowd_of_slow_ones_keeps_no_scrape_waiting(
    address: Address, sent: bytes, caplog
) -> None:
    """They are silent, send a byte now and then, or do not read; and the last ones stop nothing."""
    with ExitStack() as slow:
        crowd = []
        for _ in range(2 * MAX_CONNECTIONS):
            one = slow.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(address)
            one.sendall(sent)
            crowd.append(one)
        for _ in range(3):
            began = time.monotonic()
            assert get(url_of(address)).status_code == 200
            assert time.monotonic() - began < QUICKLY_S
            for one in crowd:
                with suppress(OSError):
                    one.sendall(b"x" if sent else b"")
    assert caplog.text == ""


def test_a_request_has_a_time_limit_as_a_whole(monkeypatch, address: Address) -> None:
    monkeypatch.setattr(module, "REQUEST_WITHIN_S", 0.3)
    with socket.create_connection(address, timeout=30) as slow:
        began = time.monotonic()
        with suppress(OSError):
            while True:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert 0.2 < time.monotonic() - began < QUICKLY_S


def test_scrapes_at_the_same_time_cost_the_agent_one() -> None:
    """And while one of it hangs, the relay ends at once."""
    with socket.create_server(("127.0.0.1", 0)) as agent, ExitStack() as stack:
        port = agent.getsockname()[1]
        stopping = stack.enter_context(ExitStack())
        stopping.enter_context(metrics_relay(ELSEWHERE, (own := free_port()), port, NOBODYS))
        for _ in range(3):
            one = stack.enter_context(socket.create_connection((ELSEWHERE, own)))
            one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        agent.settimeout(30)
        stack.enter_context(agent.accept()[0])
        agent.settimeout(0.3)
        with pytest.raises(TimeoutError):
            agent.accept()
        began = time.monotonic()
        stopping.close()
        assert time.monotonic() - began < QUICKLY_S


def test_a_client_that_resets_is_nothing_to_print(address: Address, capfd) -> None:
    for _ in range(3):
        client = socket.create_connection(address)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.send(b"GET /metrics HTTP/1.1\r\n\r\n")
        client.close()
    assert get(url_of(address)).status_code == 200
    assert capfd.readouterr().err == ""


def test_rays_exporter_is_put_on_a_socket(monkeypatch, tmp_path: Path, capfd) -> None:
    """It asks for a port of all interfaces, and is told that it has it."""
    path = tmp_path / "scrapes.sock"
    path.touch()  # an agent's before
    monkeypatch.setattr(simple_server, "make_server", simple_server.make_server)
    _show_metrics_at(path)
    server = simple_server.make_server("", 4711, make_wsgi_app(registry()))
    assert server.server_address[1] == 4711
    assert server.socket.family == socket.AF_UNIX
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with metrics_relay(ELSEWHERE, free_port(), path, NOBODYS) as url:
        assert "ray_tandem_queue_length 7.0" in get(url).text
    server.shutdown()
    server.server_close()
    thread.join()
