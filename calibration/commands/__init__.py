"""The commands that calibration adds to ``tandem``: fetch, add, quantize and others."""
