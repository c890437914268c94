"""Autoscaling at run time: what replicas report, and the policy that sizes all stages together.

Every image visits every stage, and what it costs there in CPU time is measured. So one arrival rate
sizes all stages together (:mod:`app.scaling.policy`), which Serve asks for through
:mod:`app.scaling.serve_policy`.
"""
