"""The project's configurations, a small good one, and changes of it."""

import copy
from pathlib import Path
from typing import Any

import yaml

from app.launch.config import ServeConfig

ROOT = Path(__file__).parents[2]
SHIPPED = [
    path
    for path in [ROOT / "serve_config.yaml", *sorted((ROOT / "configs").rglob("*.yaml"))]
    if "\n    import_path: app." in path.read_text("utf-8")
]
APPLICATION = {
    "name": "tandem",
    "import_path": "app.main:build",
    "args": {"model_set": "imagenette"},
    "deployments": [{"name": "Gateway", "autoscaling_config": {"min_replicas": 1}}],
}
GOOD = {"http_options": {"host": "127.0.0.1", "port": 8000}, "applications": [APPLICATION]}


def write(folder: Path, content: object) -> Path:
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(content), "utf-8")
    return path


def with_key(content, place, key, value):
    """Return a copy in which ``key`` of what is at ``place`` is ``value``."""
    changed = copy.deepcopy(content)
    target: Any = changed
    for step in place:
        target = target[step]
    target[key] = value
    return changed


def deployment_of(config: ServeConfig, name: str) -> dict[str, Any]:
    """Return the options of a deployment; StopIteration if the configuration has none."""
    return next(dict(d) for d in config.deployments if d["name"] == name)


def with_deployment(config: ServeConfig, options: dict[str, Any]) -> ServeConfig:
    """Return a copy with other options of the deployment that ``options`` names."""
    content = config.as_dict()
    (application,) = content["applications"]
    application["deployments"] = [
        options if d["name"] == options["name"] else d for d in application["deployments"]
    ]
    return ServeConfig.of(content)
