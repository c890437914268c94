"""Calls of stages that are deployments of their own: routing, retries and hedging.

Calls go through Ray, or over a socket to a replica on the same node (:mod:`app.calls.channels`).
These modules do not know the stages' work; :mod:`app.graph` decides which stage is called when.
"""
