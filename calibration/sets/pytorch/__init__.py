"""Converts PyTorch files to IR or ONNX, in a process of its own: loading one runs code of it."""
