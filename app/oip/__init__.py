"""The Open Inference Protocol (KServe's V2) as HTTP and gRPC share it: tensors, models, inference.

``tensors``, ``request`` and ``json_body`` are the protocol alone and know no framework.
"""
