"""The ``tandem`` command line: a module for each command, and shared options and output.

Commands parse arguments and print results; the packages below do the work. Ray is imported only
when a command needs it: ``tandem serve`` must first set the environment that Ray reads at import.
"""
