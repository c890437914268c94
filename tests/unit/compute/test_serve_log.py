"""Serve's log on stderr has the lines of its files: with the handlers that Ray itself makes."""

import json
import logging
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
from ray.serve._private import logging_utils
from ray.serve._private.common import ServeComponentType
from ray.serve.schema import LoggingConfig

from app.compute.serve_log import write_to_stderr_as_to_files

Configure = Callable[[str, bool], None]
logger = logging.getLogger("ray.serve")


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    """Make a replica's handlers as Ray does, of an encoding, with stderr or without."""
    before = list(logger.handlers), logger.propagate, logger.level

    def configure(encoding: str, has_stderr: bool) -> None:
        monkeypatch.setattr(logging_utils, "RAY_SERVE_LOG_TO_STDERR", has_stderr)
        logging_utils.configure_component_logger(
            component_name="tandem_Gateway",
            component_id="abc",
            logging_config=LoggingConfig(encoding=encoding, logs_dir=str(tmp_path)),
            component_type=ServeComponentType.REPLICA,
            max_bytes=2**20,
            backup_count=1,
        )

    yield configure
    for handler in logger.handlers:
        if isinstance(handler, MemoryHandler):
            handler.target.close()
        handler.close()
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def in_files(folder: Path) -> str:
    for handler in logger.handlers:
        handler.flush()
    (file,) = folder.iterdir()
    return file.read_text("utf-8")


def test_stderr_has_the_json_of_the_files(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("JSON", True)
    write_to_stderr_as_to_files()
    write_to_stderr_as_to_files()  # a process may have several stages
    logger.info("a line")
    try:
        raise KeyError("reason")
    except KeyError:
        logger.exception("an error")
    said = capsys.readouterr().err
    line, error = map(json.loads, said.splitlines())
    assert (line["message"], line["levelname"]) == ("a line", "INFO")
    assert (line["deployment"], line["replica"]) == ("tandem_Gateway", "abc")
    assert "KeyError: 'reason'" in error["exc_text"]
    assert in_files(tmp_path) == said


def test_without_us_it_is_text(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    """When Ray writes JSON there by itself, app/compute/serve_log.py can go."""
    configure("JSON", True)
    logger.info("a line")
    assert capsys.readouterr().err.startswith("INFO ")


def test_text_stays_text(
    configure: Configure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("TEXT", True)
    write_to_stderr_as_to_files()
    logger.info("a line")
    said = capsys.readouterr().err
    assert said.startswith("INFO ")
    assert in_files(tmp_path) == said


def test_where_serve_logs_to_files_alone_stderr_stays_empty(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    for name in ("builtins.print", "sys.stdout", "sys.stderr"):  # which Ray replaces then
        module, _, attribute = name.partition(".")
        monkeypatch.setattr(name, getattr(__import__(module), attribute))
    configure("JSON", False)
    write_to_stderr_as_to_files()
    logger.info("a line")
    assert json.loads(in_files(tmp_path))["message"] == "a line"
    assert capfd.readouterr().err == ""
