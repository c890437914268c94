"""The gRPC interface: ``tandem.proto`` and ``open_inference.proto``, on Serve's own gRPC ingress.

``*_pb2*.py*`` are made from them; ``make proto`` makes them again.
"""
