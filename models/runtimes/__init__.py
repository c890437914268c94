"""Runtimes of members: OpenVINO and ONNX Runtime behind one interface.

``load(path, options)`` gives a network that answers uint8 images with probabilities; the file's
suffix says which runtime it is for. ONNX Runtime is an extra: it is imported when the first network
of its own is loaded, and by nothing else.
"""
