"""Processes that decode small photos for a Gateway, so that its event loop and interpreter do not.

``pool.py`` hands each photo to one of them, ``process.py`` keeps one fed, watched and alive,
``child.py`` starts it, ``worker.py`` is what runs in it, ``slots.py`` the memory and the messages
between the two, and ``small.py`` says what a small photo is. ``loop_turn.py`` is for the event loop
where it decodes them itself.
"""
