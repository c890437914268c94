"""The study of protocols, payloads and serialisers that tests/load/protocols.py runs.

``ways`` are how an image gets to the service, ``generator`` loads it by one of them from a process
of its own, ``turns`` says what is measured meanwhile, ``serialisers`` measures formats of a tensor
by themselves, ``tables``, ``plots`` and ``document`` write docs/protocols.md from the figures.
"""
