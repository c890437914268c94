"""Imports classifiers for other runtimes than OpenVINO: ONNX Runtime and PyTorch."""
