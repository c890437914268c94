"""Ray's Python processes as forks of one that has imported what they need.

Ray starts an interpreter for each of its agents and workers, and each imports Ray, Serve and the
application again: most of the CPU time of a start, and memory that each has for itself. Here Ray is
given another script to start (:mod:`~app.launch.forks.client`), which asks the fork server
(:mod:`~app.launch.forks.server`) for a fork that becomes the process wanted.
"""
