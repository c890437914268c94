"""What protects a service wherever it runs, read from the code and the configurations.

Each column of the table is a way to run it: a Serve configuration, the environment of its nodes,
and the rules of its HAProxy. A protection that one way lacks is an empty cell.
"""

import configparser
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ray.serve._private import constants
from ray.serve._private.config import DeploymentConfig

from app.environment import (
    BUFFER_BYTES,
    GATEWAY_TIMEOUT,
    HEADER_BYTES,
    node_environment,
    serve_environment,
)
from app.graph.availability import HEDGE_AFTER_SHARE, MAX_CALLS
from app.launch.haproxy import SILENT_S
from app.launch.haproxy_rules import Edit, OwnService, RuleOptions, edits_of
from app.settings import Settings

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "configs" / "kubernetes"
SERVE_DEFAULTS = DeploymentConfig()
OWN = OwnService("127.0.0.1", (Path("http"), Path("grpc")))
NOTHING = "-"
Row = tuple[str, ...]


@dataclass(frozen=True)
class Way:
    """A way to run the service."""

    name: str
    config: Mapping[str, Any]  # of Serve
    environment: Mapping[str, str]
    own: OwnService | None  # of an HAProxy on one machine

    @property
    def gateway(self) -> Mapping[str, Any]:
        of = self.config["applications"][0]["deployments"]
        return next(deployment for deployment in of if deployment["name"] == "Gateway")

    @property
    def settings(self) -> Settings:
        return Settings.model_validate(self.config["applications"][0]["args"])

    @property
    def edits(self) -> list[Edit]:
        options = RuleOptions(max_requests=self.settings.max_concurrent_requests)
        if waits_s := self.environment.get(GATEWAY_TIMEOUT):
            options = options._replace(gateway_timeout_ms=int(1e3 * float(waits_s)))
        return edits_of(options, self.own)

    def rule(self, pattern: str) -> str:
        """Return what the rules for HTTP requests say, by the first group of a pattern."""
        (text,) = (e.replacement for e in self.edits if e.purpose == "the limits of HTTP requests")
        found = re.search(rf"^ *{pattern}", _evaluated(text), re.MULTILINE)
        return found[1] if found else NOTHING

    def variable(self, name: str, default: str = "") -> str:
        """Return a variable of the environment, or Serve's default, of a constant of its name."""
        value = self.environment.get(name, getattr(constants, default or name, None))
        if value is None:
            return "HAProxy's default"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def option(self, name: str) -> str:
        return f"{self.gateway.get(name, getattr(SERVE_DEFAULTS, name)):g}"

    @property
    def num_gateways(self) -> str:
        scaling = self.gateway.get("autoscaling_config") or {}
        return str(scaling.get("min_replicas", self.gateway.get("num_replicas", 1)))

    @property
    def answer_time(self) -> str:
        own, most = self.settings.answer_timeout_s, self.settings.request_timeout_s
        waits_s = self.environment.get(GATEWAY_TIMEOUT)
        usual = f"{0.8 * float(waits_s):g}" if waits_s else f"{most:g}"
        return usual if own is None else f"{own:g}"


def ways() -> list[Way]:
    """Return the ways that the project describes."""
    own_config, haproxy = _yaml("serve_config.yaml"), Path("haproxy")
    silent = {"RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(SILENT_S)}
    alone = silent | serve_environment(Path("run"), (1, 2))
    node = node_environment(haproxy)
    kuberay = _yaml("configs/kubernetes/kuberay/rayservice.yaml")["spec"]
    of_serve = yaml.safe_load(kuberay["serveConfigV2"])
    (head,) = kuberay["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    of_head = {variable["name"]: variable.get("value", "") for variable in head["env"]}
    return [
        Way("`tandem serve`, also in a container", own_config, alone, OWN),
        Way("`serve run`, `tandem environment`", own_config, node, None),
        Way("`cluster-whole.yaml`", _yaml("configs/cluster-whole.yaml"), node, None),
        Way("`cluster.yaml`", _yaml("configs/cluster.yaml"), node, None),
        Way("KubeRay", of_serve, of_head, None),
    ]


ROWS: tuple[tuple[str, Callable[[Way], str]], ...] = (
    ("Gateways at least", lambda way: way.num_gateways),
    ("s between health checks of a Gateway", lambda way: way.option("health_check_period_s")),
    ("s that a Gateway has to answer one", lambda way: way.option("health_check_timeout_s")),
    (
        "checks that fail before it is replaced",
        lambda _: str(constants.REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD),
    ),
    (
        "s in which a Gateway that ends answers the rest",
        lambda way: way.option("graceful_shutdown_timeout_s"),
    ),
    ("s of a request, its upload included", lambda way: f"{way.settings.request_timeout_s:g}"),
    ("s of an answer, once the request is there", lambda way: way.answer_time),
    (
        "calls of a stage apart; s after which a second replica is asked",
        lambda way: (
            f"{MAX_CALLS}; {HEDGE_AFTER_SHARE * float(way.answer_time):g}"
            if way.settings.members == "deployment"
            else NOTHING
        ),
    ),
    ("HAProxy asks another Gateway on", lambda way: way.rule("retry-on (.*)")),
    ("s that HAProxy waits for a Gateway", lambda way: _seconds(way.rule(r"timeout server (\S+)"))),
    (
        "s in which a body begins to arrive",
        lambda way: _seconds(way.rule(r"http-request wait-for-body time (\S+) at-least")),
    ),
    ("attempts after the first", lambda way: way.variable("RAY_SERVE_HAPROXY_RETRIES")),
    (
        "bytes of a body that can be sent again",
        lambda way: str(int(way.variable(BUFFER_BYTES)) - HEADER_BYTES),
    ),
    ("s to connect", lambda way: way.variable("RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S")),
    ("s of silence in a body", lambda way: way.variable("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S")),
    (
        "errors before HAProxy leaves a Gateway out",
        lambda way: way.variable("RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT"),
    ),
    (
        "HAProxy looks at a Gateway every; if it is down",
        lambda way: "; ".join(
            way.variable(f"RAY_SERVE_HAPROXY_HEALTH_CHECK_{name}")
            for name in ("INTER", "DOWNINTER")
        ),
    ),
    (
        "s between health checks of HAProxy",
        lambda way: way.variable(
            "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "PROXY_HEALTH_CHECK_PERIOD_S"
        ),
    ),
    (
        "checks that fail before HAProxy is replaced",
        lambda _: str(constants.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD),
    ),
    (
        "s that HAProxy has to end after a reload",
        lambda way: way.variable("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"),
    ),
    (
        "s between Serve's looks at all it runs",
        lambda way: way.variable("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "CONTROL_LOOP_INTERVAL_S"),
    ),
    (
        "late answers before Ray gives a node up",
        lambda way: way.environment.get("RAY_health_check_failure_threshold", "Ray's default"),
    ),
)


def tables_of_protections() -> tuple[list[Row], list[Row], list[Row]]:
    """Return three tables: the values, HAProxy's rules, and what is started again from outside."""
    every = ways()
    head = ("", *(way.name for way in every))
    values = [(name, *(read(way) for way in every)) for name, read in ROWS]
    purposes = dict.fromkeys(edit.purpose for way in every for edit in way.edits)
    rules = [
        (purpose, *("yes" if purpose in _purposes(way) else NOTHING for way in every))
        for purpose in purposes
    ]
    return [head, *values], [head, *rules], [OUTSIDE, *_outside()]


OUTSIDE = ("what", "started again", "s to end", "s until it counts as dead", "at least")


def _outside() -> list[Row]:
    """Return what starts the service again: systemd, Compose, Kubernetes."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(ROOT / "configs/systemd/tandem.service")
    of_unit = unit["Service"]
    restart = f"{of_unit['Restart']}, after {of_unit['RestartSec']} s"
    watchdog = of_unit.get("WatchdogSec", NOTHING)
    compose = _yaml("configs/compose/compose.yaml")["services"]["tandem"]
    rows: list[Row] = [
        ("`configs/systemd`", restart, of_unit["TimeoutStopSec"], watchdog, "1"),
        (
            "`configs/compose`",
            compose["restart"],
            compose["stop_grace_period"].rstrip("s"),
            NOTHING if "healthcheck" not in compose else str(compose["healthcheck"]),
            "1",
        ),
    ]
    (scaling, _) = yaml.safe_load_all((KUBERNETES / "base/scaling.yaml").read_text("utf-8"))
    base = _yaml("configs/kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]
    rows.append(_pod("`configs/kubernetes/base`", base, scaling["spec"]["minReplicas"]))
    cluster = _yaml("configs/kubernetes/kuberay/rayservice.yaml")["spec"]["rayClusterConfig"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    is_kept = "gcsFaultToleranceOptions" in cluster
    state = "state in Redis" if is_kept else "its state is lost"
    rows.append(_pod(f"KubeRay's head, {state}", head["template"]["spec"], 1))
    rows.append(_pod("KubeRay's workers", workers["template"]["spec"], workers["minReplicas"]))
    return rows


def _pod(name: str, spec: Mapping[str, Any], least: int) -> Row:
    """Return the row of pods, whose containers Kubernetes starts again."""
    (container,) = spec["containers"]
    probe = container.get("livenessProbe")
    dead = str(probe["periodSeconds"] * probe["failureThreshold"]) if probe else NOTHING
    ready = container["readinessProbe"]
    unready = ready["periodSeconds"] * ready["failureThreshold"]
    ends = str(spec.get("terminationGracePeriodSeconds", 30))  # Kubernetes' default
    return name, "always", ends, f"{dead}; without requests after {unready}", str(least)


def _evaluated(text: str) -> str:
    """Return a text of HAProxy's without the lines that its ``.if`` 0 or 1 leaves out."""
    lines, holds = [], [True]
    for line in text.splitlines():
        match line.split():
            case [".if", value]:
                holds.append(value == "1")
            case [".else"]:
                holds[-1] = not holds[-1]
            case [".endif"]:
                holds.pop()
            case _ if all(holds):
                lines.append(line)
    return "\n".join(lines)


def _purposes(way: Way) -> set[str]:
    return {edit.purpose for edit in way.edits}


def _seconds(value: str) -> str:
    """Return HAProxy's time without its unit."""
    if value.endswith("ms"):
        return f"{int(value[:-2]) / 1e3:g}"
    return value.rstrip("s")


def _yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text("utf-8"))
