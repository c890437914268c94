"""The operator's own functions in the graph: pixels to pixels, rows to rows.

:mod:`app.functions.signatures` says what they take and return, :mod:`app.functions.loading` finds
them by the names in the settings, :mod:`app.functions.trial` tries them before anything is served,
and :mod:`app.functions.stages` calls them for requests.
"""
