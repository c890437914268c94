"""Runtimes of members: OpenVINO and ONNX Runtime behind one interface.

``load(path, options)`` returns a network that maps uint8 images to probabilities; the file's suffix
determines the runtime. ONNX Runtime is an extra, which is imported only when a network of its own
is loaded.
"""
