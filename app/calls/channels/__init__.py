"""Calls between replicas of one node over Unix-domain sockets, past Ray and Serve's router.

A lone image's call through Ray costs some 3.5 CPU-ms in the two processes beside the stage's work;
over a socket that both event loops read themselves it costs 1 (tests/load/results/apart.json).
:mod:`app.calls.remote` takes a channel where there is one, and the deployment's handle where there
is none: replicas of other nodes, and those that do not answer.
"""
