"""The gRPC interface: the ensemble as ``tandem.proto`` describes it, on Serve's own gRPC ingress.

``tandem_pb2*.py*`` are made from it; ``make proto`` makes them again.
"""
