"""``tandem bench``: load tests of a running service.

The load comes from another process, whose cost is measured. Arrival times of an open loop are drawn
in advance, and latency counts from the scheduled time. Otherwise a slow service would slow down its
own load, and look fast.
"""
