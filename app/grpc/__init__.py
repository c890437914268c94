"""The gRPC interface, on Serve's own gRPC ingress.

``make proto`` generates ``*_pb2*.py*`` from ``tandem.proto``, ``open_inference.proto`` and
``tensorflow_serving.proto``.
"""
