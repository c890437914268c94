"""Autoscaling at run time: the replicas' reports, and the policy that sizes all stages together.

Every image visits every stage, and its CPU time there is measured. So a single arrival rate sizes
all stages (:mod:`app.scaling.policy`). Serve calls the policy through
:mod:`app.scaling.serve_policy`.
"""
