"""Warnings of a traced request carry its trace id."""

import logging

import pytest

from app.telemetry.export import TraceIds


@pytest.fixture
def record() -> logging.LogRecord:
    return logging.makeLogRecord({"msg": "something is wrong"})


def test_a_line_of_a_traced_request_has_its_id(record, request_span):
    assert TraceIds().filter(record)
    assert record.trace_id == f"{request_span.context.trace_id:032x}"


def test_any_other_line_has_none(record, exported):
    assert TraceIds().filter(record)
    assert not hasattr(record, "trace_id")
