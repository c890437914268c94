"""One call of one stage: in this process or of a deployment, sent again, hedged, and routed.

Through Ray, or over a socket to a replica of the same node (:mod:`app.calls.channels`).

Nothing here knows what the stages compute; :mod:`app.graph` says which is called when.
"""
