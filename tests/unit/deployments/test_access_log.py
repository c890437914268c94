"""Serve's access log: where it is off no record is made, where it is on nothing is lost."""

import logging
from collections.abc import Iterator

import pytest
from ray.serve._private.logging_utils import log_access_log_filter
from ray.serve.schema import LoggingConfig

from app.deployments.access_log import MARK, drops_access_log, skip_filtered_access_log


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Logger(logging.Logger):
    """Counts the records that are made."""

    num_made = 0

    def makeRecord(self, *args, **options):
        self.num_made += 1
        return super().makeRecord(*args, **options)


@pytest.fixture
def logger() -> Iterator[Logger]:
    made = Logger("like-serves", logging.INFO)
    made.propagate = False
    skip_filtered_access_log(made)
    return made


def test_no_record_is_made_of_what_all_handlers_drop(logger):
    handler = Kept()
    handler.addFilter(log_access_log_filter)
    logger.addHandler(handler)
    logger.info("POST / 200", extra={MARK: True})
    assert logger.num_made == 0
    logger.info("of %s", "ours")
    logger.info("another of Serve's", extra={"log_to_stderr": False})
    assert [r.getMessage() for r in handler.records] == ["of ours", "another of Serve's"]


def test_a_handler_that_wants_it_gets_it(logger):
    filtered, unfiltered = Kept(), Kept()
    filtered.addFilter(log_access_log_filter)
    logger.addHandler(filtered)
    logger.addHandler(unfiltered)
    logger.info("POST / 200", extra={MARK: True})
    assert [r.getMessage() for r in unfiltered.records] == ["POST / 200"]
    assert not filtered.records


def test_switching_it_on_while_it_runs_has_effect(logger):
    before, after = Kept(), Kept()
    before.addFilter(log_access_log_filter)
    logger.addHandler(before)
    logger.info("POST / 200", extra={MARK: True})
    logger.handlers.clear()  # as Serve does when its logging is configured anew
    logger.addHandler(after)
    logger.info("POST / 200", extra={MARK: True})
    assert (len(before.records), len(after.records)) == (0, 1)


def test_the_caller_is_told_as_before_and_twice_is_as_once(logger):
    skip_filtered_access_log(logger)
    handler = Kept()
    logger.addHandler(handler)
    logger.info("ours")
    (record,) = handler.records
    assert (record.filename, record.funcName) == (
        "test_access_log.py",
        "test_the_caller_is_told_as_before_and_twice_is_as_once",
    )


def test_a_filter_of_another_name_is_asked_as_well(logger):
    """Serve may call its own otherwise: requests must not become slow for that."""

    class Dropping(logging.Filter):
        def filter(self, record):
            return not getattr(record, MARK, False)

    for drops in (lambda record: not getattr(record, MARK, False), Dropping()):
        logger.handlers.clear()
        handler = Kept()
        handler.addFilter(logging.Filter("ray"))  # of another purpose
        handler.addFilter(drops)
        logger.addHandler(handler)
        assert drops_access_log(logger)
        handler.filters.pop()
        assert not drops_access_log(logger)


def test_serve_still_filters_by_that_key():
    record = logging.makeLogRecord({MARK: True})
    assert not log_access_log_filter(record)
    assert log_access_log_filter(logging.makeLogRecord({}))
    assert LoggingConfig().enable_access_log  # the default: on, and then nothing is skipped
