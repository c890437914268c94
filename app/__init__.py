"""The Ray Serve application and its command line; the only package that imports ray.

``main.py`` binds the graph; ARCHITECTURE.md says what each package is and which way imports go.
Pixels, networks and the average are the business of :mod:`models`; nothing here knows an input size
or a class count.
"""
