"""The processes of ``tandem ladder``: each runs a network in one way, and measures it."""
