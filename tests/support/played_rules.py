"""Series played to the shipped alert rules by promtool, which asserts what fires when."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.support.prometheus_programs import PROMTOOL

ALERTS = Path(__file__).parents[2] / "configs" / "prometheus" / "alerts.yaml"
Labels = Mapping[str, str]


def series(name: str, labels: Labels, values: str) -> dict[str, str]:
    """Return an input series; ``values`` in promtool's notation (``0+5x60``: 0, 5, 10, ...)."""
    told = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{told}}}", "values": values}


def play(folder, given, alert, expected, every_s=10):
    """Assert with which labels ``alert`` fires at which time (``10m``).

    ``every_s`` is the time between two values, and between two looks at the rules.
    """
    asked = [
        {
            "expr": f'ALERTS{{alertname="{alert}",alertstate="firing"}}',
            "eval_time": at,
            "exp_samples": [{"labels": _firing(alert, labels), "value": 1} for labels in firing],
        }
        for at, firing in expected.items()
    ]
    play_expressions(folder, given, asked, every_s)


def play_expressions(folder, given, asked, every_s):
    """Assert what expressions say: ``asked`` as promtool's ``promql_expr_test``."""
    test = {"interval": f"{every_s}s", "input_series": list(given), "promql_expr_test": list(asked)}
    tests = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": f"{every_s}s",
        "tests": [test],
    }
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump(tests), "utf-8")
    done = subprocess.run([str(PROMTOOL), "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _firing(alert: str, labels: Labels) -> str:
    every = {"alertname": alert, "alertstate": "firing", **labels}
    return "ALERTS{" + ",".join(f'{key}="{value}"' for key, value in every.items()) + "}"
