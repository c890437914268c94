"""How many replicas each stage needs: decided while it serves, simulated, and planned ahead.

Every image visits every stage, and what it costs there in CPU time is measured. So one arrival rate
sizes all stages together (:mod:`policy`), which Serve asks for through :mod:`serve_policy`.
"""
