"""The Open Inference Protocol (KServe's V2) as HTTP and gRPC share it: tensors, models, inference.

``tensors``, ``request``, ``json_body`` and ``answer`` are the protocol alone and know no framework.
"""
