"""Calls between replicas of one node over Unix-domain sockets, without Ray and Serve's router.

A call with one image through Ray costs about 3.5 CPU-ms in the two processes, without its work.
Over a socket that both event loops read it costs 1 (tests/load/results/apart.json).
:mod:`app.calls.remote` uses a channel if there is one. Otherwise it uses the deployment's handle:
for replicas on other nodes, and for those that do not respond.
"""
