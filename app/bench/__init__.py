"""``tandem bench``: load tests of a running service, and the upper bound it is judged against.

The load comes from a process of its own, whose cost is measured; arrival times of an open loop are
drawn in advance, and latency counts from the scheduled time (else a slow service slows its own
load down and looks fast).
"""
