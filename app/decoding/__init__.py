"""Processes that decode small photos for a Gateway, so that its event loop and interpreter do not.

``process.py`` starts one and hands it files, ``worker.py`` is what runs in it, ``slots.py`` the
memory and the messages between the two, ``pool.py`` several of them, and ``small.py`` says what a
small photo is.
"""
