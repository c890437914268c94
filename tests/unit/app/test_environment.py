"""A replica's stderr has the lines of its log files, as text or as JSON."""

import builtins
import json
import logging
import sys
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
from ray.serve._private import logging_utils
from ray.serve._private.common import ServeComponentType
from ray.serve.schema import LoggingConfig

from app.environment import write_to_stderr_as_to_files

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
    """Return what the handlers have written there."""
    for handler in logger.handlers:
        handler.flush()
    (file,) = folder.iterdir()
    return file.read_text("utf-8")


def test_stderr_has_the_json_of_the_files(configure, tmp_path, capsys):
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


@pytest.mark.parametrize("is_ours", [True, False], ids=["text stays text", "without us"])
def test_without_us_or_asked_for_it_is_text(configure, tmp_path, capsys, is_ours):
    """When Ray writes JSON there by itself, app/environment.py can go."""
    configure("TEXT" if is_ours else "JSON", True)
    if is_ours:
        write_to_stderr_as_to_files()
    logger.info("a line")
    said = capsys.readouterr().err
    assert said.startswith("INFO ")
    assert (in_files(tmp_path) == said) is is_ours


def test_where_serve_logs_to_files_alone_stderr_stays_empty(
    configure, tmp_path, monkeypatch, capfd
):
    for owner, name in ((builtins, "print"), (sys, "stdout"), (sys, "stderr")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # which Ray replaces then
    configure("JSON", False)
    write_to_stderr_as_to_files()
    logger.info("a line")
    assert (json.loads(in_files(tmp_path))["message"], capfd.readouterr().err) == ("a line", "")
