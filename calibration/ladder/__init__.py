"""The processes of ``tandem ladder``: each runs one network in one way, and measures it."""
