"""Imports classifiers for the runtimes: OpenVINO, and ONNX Runtime."""
