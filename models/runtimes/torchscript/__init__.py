"""TorchScript files, read as data, checked against an allow-list, written anew, and only then run.

``archive`` reads the ZIP, ``pickled`` its pickles as opcodes, ``source`` and ``functions`` its code
as a syntax tree, ``operators`` is the allow-list, ``rewritten`` writes what was found to be
harmless. PyTorch opens what was written here, never the file. All but ``network`` need no torch.
"""
