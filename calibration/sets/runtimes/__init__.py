"""Imports classifiers for other runtimes than OpenVINO: ONNX Runtime, PyTorch and TorchScript."""
