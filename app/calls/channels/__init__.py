"""Calls between replicas of one node over Unix-domain sockets, past Ray and Serve's router.

A call through Ray costs some 2 CPU-ms in its two processes, whatever it carries; over a socket that
both event loops read themselves it costs a tenth of that. :mod:`app.calls.batched` takes a channel
where there is one, and the deployment's handle where there is none: replicas of other nodes, and
those that do not answer.
"""
