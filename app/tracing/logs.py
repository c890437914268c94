"""Adds the trace id to the log lines of a traced request."""

import logging

from opentelemetry import trace
from opentelemetry.trace import format_trace_id


class TraceIds(logging.Filter):
    """Adds ``trace_id`` to the records that are made while a traced request is served."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let everything pass."""
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            record.trace_id = format_trace_id(context.trace_id)
        return True
