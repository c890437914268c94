"""Write the manifests that repeat other files: ``python configs/kubernetes/render.py``.

A test compares them with what they repeat.
"""

import re
from importlib.metadata import version
from pathlib import Path
from textwrap import indent

import yaml

from app.environment import node_environment
from app.launch.config import ServeConfig
from app.launch.haproxy import MAX_CONNECTIONS

HERE = Path(__file__).parent
CONFIGS = HERE.parent
HAPROXY = Path("/opt/haproxy/haproxy")  # where the Dockerfile puts the command
GRPC_PORT = 9000
KEYS = "/etc/tandem/keys"  # where the pods have the Secret
GENERATED = "# Written by configs/kubernetes/render.py from {}: change that.\n"


def serve_config() -> ServeConfig:
    """Return what the RayService serves: whole graphs, over gRPC too, to callers with a key."""
    config = ServeConfig.read(CONFIGS / "cluster-whole.yaml")
    # The NetworkPolicy shows the metrics to Prometheus alone.
    return config.changed(grpc_port=GRPC_PORT, api_keys_file=KEYS, key_names_in_metrics=True)


def environment() -> dict[str, str]:
    """Return every Ray node's environment."""
    return node_environment(HAPROXY) | {
        # HAProxy does not start where a process may open fewer files than two for each.
        "RAY_SERVE_HAPROXY_MAXCONN": str(MAX_CONNECTIONS),
        "RAY_SERVE_LOG_TO_STDERR": "1",  # for kubectl logs; with no-redirect-output
    }


def ray_service() -> str:
    """Return the template with the configuration, the environment and Ray's version filled in."""
    text = (HERE / "kuberay" / "template.yaml").read_text("utf-8")
    config = yaml.safe_dump(serve_config().as_dict(), sort_keys=False, width=100)
    variables = (f'- {{name: {name}, value: "{value}"}}' for name, value in environment().items())
    text = text.replace("RAY_VERSION", f'"{version("ray")}"')
    text = _filled(text, "CONFIG", "|", config.rstrip())
    return _filled(text, "&environment ENVIRONMENT", "&environment", "\n".join(variables))


def prometheus_rule() -> str:
    """Return the alert rules as the Prometheus operator has them."""
    head = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tandem"},
    }
    rules = yaml.safe_load((CONFIGS / "prometheus" / "alerts.yaml").read_text("utf-8"))
    text = yaml.safe_dump(head | {"spec": rules}, sort_keys=False, width=100)
    return GENERATED.format("configs/prometheus/alerts.yaml") + text


WRITTEN = {
    HERE / "kuberay" / "rayservice.yaml": ray_service,
    HERE / "monitoring" / "prometheus-rule.yaml": prometheus_rule,
}


def _filled(text: str, name: str, mark: str, value: str) -> str:
    """Put ``value`` in place of ``name``, below its key and further in than that."""

    def below(found: re.Match[str]) -> str:
        margin = found["margin"] + "  "
        return f"{found['margin']}{found['key']}: {mark}".rstrip() + f"\n{indent(value, margin)}"

    return re.sub(rf"^(?P<margin> *)(?P<key>\w+): {name}$", below, text, flags=re.MULTILINE)


if __name__ == "__main__":
    for path, rendered in WRITTEN.items():
        path.write_text(rendered(), "utf-8")
