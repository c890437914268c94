"""Metrics: counts and measurements of a replica, exported through Ray's metrics API.

:mod:`app.metrics.table` lists them. Outside of replicas, as in tests, nothing is counted.
"""
