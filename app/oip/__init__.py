"""The Open Inference Protocol (KServe's V2) for HTTP and gRPC: tensors, models, inference.

``tensors`` and ``bodies`` contain only the protocol, without any framework.
"""
