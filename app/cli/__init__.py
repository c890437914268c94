"""The ``tandem`` command line: one module per command, and what they print and write.

The commands parse and print. Their work is done in the packages below, and Ray is imported only
once a command needs it (``tandem serve`` must first set the environment that Ray reads at import).
"""
