"""The HTTP interface: routes, bodies, keys, errors, and the web page."""
