"""Traces: spans of requests and batches, sent to a collector.

Serve starts tracing in each replica (``tracing_config``) and makes the request's own span.
:mod:`app.tracing.parents` finds this span, :mod:`app.tracing.spans` adds those of the stages, and
:mod:`app.tracing.pipeline` exports them.
"""
