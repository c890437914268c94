"""``tandem tune``: searches replicas, streams, threads and batch sizes for this machine.

What is measured is the graph inside its processes: decode, batch queues, networks, Combiner. HTTP
and Ray are not in it; they add a few milliseconds and percent, which ``tandem bench`` measures.
"""
