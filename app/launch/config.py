"""Reads serve_config.yaml strictly: an unknown key, which Serve ignores, is an error here."""

import difflib
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import ServeDeploySchema

from app.errors import ConfigError
from app.scaling.policy import ScalingOptions
from app.settings import Settings
from models.manifest import Manifest

POLICY = "app.scaling.serve_policy:EnsemblePolicy"


def read_config(path: Path) -> dict[str, Any]:
    """Return the file's content after checking every key and value of Serve's schema and ours."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give --config FILE") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is empty or not a mapping; see serve_config.yaml in the project")
    if unknown := unknown_keys(content, ServeDeploySchema) + _unknown_in_policies(content):
        raise ConfigError(f"{path}: " + "; ".join(unknown))
    try:
        ServeDeploySchema.model_validate(content)
        for application in content.get("applications", []):
            Settings.model_validate(application.get("args", {}))
            ScalingOptions.model_validate(_policy_kwargs(application))
    except ValidationError as error:
        places = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}"
            + (
                _suggestion(e["loc"][-1], Settings, ScalingOptions)
                if e["type"] == "extra_forbidden"
                else ""
            )
            for e in error.errors()
        ]
        raise ConfigError(f"{path}: " + "; ".join(places)) from error
    return content


def _unknown_in_policies(content: dict[str, Any]) -> list[str]:
    """Return the surprises in autoscaling_policy, which Serve's schema leaves open."""
    return [
        line
        for index, application in enumerate(content.get("applications") or [])
        if isinstance(application, dict)
        for line in unknown_keys(
            application.get("autoscaling_policy"),
            AutoscalingPolicy,
            f"applications[{index}].autoscaling_policy",
        )
    ]


def _policy_kwargs(application: dict[str, Any]) -> Any:
    """Return what our own autoscaling policy is given; {} where another one decides."""
    policy = application.get("autoscaling_policy") or {}
    return policy.get("policy_kwargs", {}) if policy.get("policy_function") == POLICY else {}


def _suggestion(key: object, *models: type[BaseModel]) -> str:
    known = [field for model in models for field in model.model_fields]
    close = difflib.get_close_matches(str(key), known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_keys(content: Any, model: type[BaseModel], where: str = "") -> list[str]:
    """Compare a parsed file with a pydantic model, however deep; return one line per surprise."""
    if not isinstance(content, dict):
        return []
    known = dict(model.model_fields)
    found = []
    for key, value in content.items():
        place = f"{where}.{key}" if where else str(key)
        if key not in known:
            found.append(f"{place} is no option{_suggestion(key, model)}")
            continue
        for inner in _models_in(known[key].annotation):
            rows = value if isinstance(value, list) else [value]
            for index, row in enumerate(rows):
                spot = f"{place}[{index}]" if isinstance(value, list) else place
                found += unknown_keys(row, inner, spot)
    return found


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models an annotation names: ``X``, ``X | None``, ``list[X]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def with_overrides(
    content: dict[str, Any], model_set: str | None, host: str | None, port: int | None
) -> dict[str, Any]:
    """Return the configuration with the command line's wishes in their places."""
    http = {"host": "127.0.0.1", "port": 8000, **content.get("http_options", {})}
    http |= {k: v for k, v in (("host", host), ("port", port)) if v is not None}
    applications = [dict(application) for application in content.get("applications", [])]
    if not applications:
        raise ConfigError("the configuration has no applications; see serve_config.yaml")
    if model_set is not None:
        applications[0]["args"] = {**applications[0].get("args", {}), "model_set": model_set}
    return {**content, "http_options": http, "applications": applications}


def for_members(content: dict[str, Any], manifest: Manifest) -> dict[str, Any]:
    """Fit the deployments to the set's members and to where the stages run.

    Serve refuses options of what is not there. So those of stages in the Gateway's process go, and
    those of members that the set lacks. A member without options takes those of the first member
    that went, so a set of any members is served with the file's intentions.
    """
    application = dict(content["applications"][0])
    settings = Settings.model_validate(application.get("args", {}))
    places = {"Decoder": settings.decoder, "Combiner": settings.combiner}
    stages = {"Gateway"} | {name for name, place in places.items() if place == "deployment"}
    members = {member.name for member in manifest.members}
    if settings.members == "gateway":
        members = set()
    deployments = [
        d for d in application.get("deployments", []) if d["name"] not in set(places) - stages
    ]
    kept = [d for d in deployments if d["name"] in members | stages]
    gone = [d for d in deployments if d["name"] not in members | stages]
    missing = members - {d["name"] for d in kept}
    if gone:
        kept += [{**gone[0], "name": name} for name in sorted(missing)]
    application["deployments"] = kept
    return {**content, "applications": [application, *content["applications"][1:]]}
