"""Traces: the spans of a request and of every batch, kept on disk for a while, and exported.

Serve starts tracing in each replica (``tracing_config``) and makes the request's own span;
:mod:`app.tracing.parents` finds it, :mod:`app.tracing.spans` adds the stages below it, and
:mod:`app.tracing.pipeline` carries them out.
"""
