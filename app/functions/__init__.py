"""The operator's own functions in the graph: pixels to pixels, rows to rows.

:mod:`app.functions.signatures` defines their arguments and results, and
:mod:`app.functions.loading` imports them by the names in the settings. :mod:`app.functions.trial`
tries them before anything is served, and :mod:`app.functions.stages` calls them for requests.
"""
