"""Capacity planning: the nodes and replicas for a load, and simulations of scaling policies.

It only computes with measured costs, without Ray or a running service.
"""
