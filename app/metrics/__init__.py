"""Metrics: what a replica counts and measures, through Ray's own API: they come out where Ray's do.

:mod:`app.metrics.table` names them all. Nothing is counted where no replica runs (tests, ``tune``).
"""
