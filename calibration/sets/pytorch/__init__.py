"""Converts PyTorch files to IR or ONNX in a separate process, since loading one runs its code."""
