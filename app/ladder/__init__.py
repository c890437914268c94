"""``tandem ladder``: what each optimisation of a network is worth, from PyTorch to the service.

The rungs run in processes of their own (``calibration.ladder``), one at a time; only the last one,
the service over HTTP, is this package's own.
"""
