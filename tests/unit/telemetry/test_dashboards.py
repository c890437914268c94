"""The shipped dashboard and alert rules ask for nothing that is not in the table."""

import json
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
import yaml

from app.telemetry.metric_table import METRICS
from tests.support.exposed_metrics import exposed
from tests.support.prometheus_programs import PROMTOOL

CONFIGS = Path(__file__).parents[3] / "configs"
PROMETHEUS = CONFIGS / "prometheus"
EXPOSED = {name for metric in METRICS for name in exposed(metric)}
DASHBOARD = json.loads((CONFIGS / "grafana" / "tandem.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bray_\w+", expression))


def expressions() -> list[str]:
    return [rule["expr"] for rule in RULES] + [
        target["expr"] for panel in PANELS for target in panel["targets"]
    ]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel(panel: dict) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        assert names_in(target["expr"]) <= EXPOSED
        assert target["datasource"]["uid"] == "${datasource}"  # the reader's own


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert(alert: dict) -> None:
    assert names_in(alert["expr"]) <= EXPOSED
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"].keys() == {"summary", "description"}


def test_every_metric_is_shown() -> None:
    shown = set().union(*map(names_in, expressions()))
    assert [metric.name for metric in METRICS if not shown & set(exposed(metric))] == []


def test_titles_are_used_once_and_panels_do_not_overlap() -> None:
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    cells = [
        (place["x"] + right, place["y"] + down)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for right, down in product(range(place["w"]), range(place["h"]))
    ]
    assert len(set(cells)) == len(cells)
    assert all(x < 24 for x, _ in cells)


def test_what_is_recorded_by_a_rule_is_recorded_by_one_of_ours() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    asked = {name for text in expressions() for name in re.findall(r"\btandem:[\w:]+", text)}
    assert asked == recorded


@pytest.mark.prometheus
def test_promtool_takes_the_configuration() -> None:
    subprocess.run([str(PROMTOOL), "check", "config", PROMETHEUS / "prometheus.yaml"], check=True)


@pytest.mark.prometheus
def test_promtool_takes_the_dashboards_expressions(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{i}", "expr": text.replace("$__rate_interval", "1m")}
        for i, text in enumerate(expressions())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    subprocess.run([str(PROMTOOL), "check", "rules", file], check=True)


def test_the_page_of_alerts_has_the_factors_of_the_rules() -> None:
    page = (CONFIGS.parent / "docs/how-to/metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `\.\.\.(Burns\w+)` \|(.*)$", page, re.MULTILINE)
    assert {name for name, _ in rows} == {"BurnsFast", "BurnsSlowly"}
    for name, row in rows:
        rules = [rule for rule in ALERTS if rule["alert"].endswith(name)]
        for rule in rules:
            factors = set(re.findall(r"> ([\d.]+) \*", rule["expr"]))
            numbers = row.replace("once", "1 times")
            assert {f for f in factors if f"{f} times" not in numbers} == set(), rule["alert"]
        assert len(rules) == 2
    objectives = {expr for expr in re.findall(r"\* (0\.0+1)\b", str(ALERTS))}
    assert {f"{100 * (1 - float(rest)):g} %" for rest in objectives} == {"99.9 %", "99 %"}
    assert all(text in page for text in ("99.9 %", "99 %", "within 500 ms"))
    assert 'le="500"' in (PROMETHEUS / "alerts.yaml").read_text("utf-8")
