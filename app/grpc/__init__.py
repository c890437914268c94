"""The gRPC interface: ``tandem.proto`` and ``open_inference.proto``, on Serve's own gRPC ingress.

``make proto`` generates ``*_pb2*.py*`` from them.
"""
