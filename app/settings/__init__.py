"""The settings of the application: ``args`` in serve_config.yaml.

Serve's own options (replicas, autoscaling, ports) stay in serve_config.yaml.
"""

from app.settings.service import AnswerPolicy, Settings

__all__ = ["AnswerPolicy", "Settings"]
