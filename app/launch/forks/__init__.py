"""Starts Ray's Python processes as forks of a process that has already imported their modules.

Ray starts an interpreter for each of its agents and workers. Each imports Ray, Serve and the
application again, which takes most of a start's CPU time, and memory in every process. Here Ray
starts a small script instead (:mod:`~app.launch.forks.client`). The script asks the fork server
(:mod:`~app.launch.forks.server`) for a fork, which becomes the requested process.
"""
