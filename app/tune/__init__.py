"""``tandem tune``: searches replicas, streams, threads and batch sizes for this machine.

It measures the graph inside its processes: decode, batch queues, networks, Combiner. It excludes
HTTP and Ray, which add a few milliseconds and percent; ``tandem bench`` measures them.
"""
