"""The response cache: answers by an image's bytes and everything else that an answer depends on.

Here are keys, the bounded store, shared computations and stored values. :mod:`app.graph.cached`
uses them for requests.
"""
