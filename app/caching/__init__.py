"""The response cache: what an image was answered, by its bytes and all that an answer depends on.

Keys, the eviction policy, shared computations and stored values; what a request does with them is
:mod:`app.graph.cached`'s.
"""
