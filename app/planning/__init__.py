"""Capacity planning: how many nodes and replicas a load needs, and simulations of scaling policies.

Pure arithmetic on measured costs; neither Ray nor a running service is needed.
"""
