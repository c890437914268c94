"""The service's log: its two forms, and Serve's files, which are followed."""

import json
import logging
import sys
from pathlib import Path

import pytest

from app.environment import PROGRAM, mark_own_lines
from app.errors import ConfigError
from app.launch import log as module
from app.launch.log import ServeLogs, followed, logger, service_log, take_over_rays_lines
from tests.support.cases import cases


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
