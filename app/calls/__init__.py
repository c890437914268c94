"""One call of one stage: in this process or of a deployment, sent again, hedged, and routed.

Nothing here knows what the stages compute; :mod:`app.graph` says which is called when.
"""
