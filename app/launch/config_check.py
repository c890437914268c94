"""Checks a configuration strictly: an unknown key, which Serve ignores, is an error here."""

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import ServeDeploySchema

from app.errors import ConfigError
from app.scaling.policy import ScalingOptions
from app.settings import Settings

# Options of a newer Ray, which an older one leaves out (app/calls/ray_features.py warns of it).
NEWER_OPTIONS = ("max_surge_percent",)
SERVE_DEFAULT_GRACE_S = 20.0  # graceful_shutdown_timeout_s of a deployment that gives none
POLICY = "app.scaling.serve_policy:EnsemblePolicy"


def check_content(content: Mapping[str, Any], source: str) -> None:
    """Check every key and value against Serve's schema and ours.

    Raises:
        ConfigError: it names ``source``, and every surprise at once.

    """
    if unknown := unknown_keys(content, ServeDeploySchema) + _unknown_in_policies(content):
        raise ConfigError(f"{source}: " + "; ".join(unknown))
    if not content.get("applications"):
        raise ConfigError(f"{source} has no applications; see serve_config.yaml in the project")
    try:
        ServeDeploySchema.model_validate(content)
        for application in content["applications"]:
            settings = Settings.model_validate(application.get("args", {}))
            ScalingOptions.model_validate(_policy_kwargs(application))
            _check_grace(application, settings, source)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_told(error)}") from error


def _check_grace(application: Mapping[str, Any], settings: Settings, source: str) -> None:
    """Refuse deployments whose replicas, in an update, would end before their requests' time."""
    grace_s = {"Gateway": None} | {
        deployment["name"]: deployment.get("graceful_shutdown_timeout_s")
        for deployment in application.get("deployments", [])
    }
    for name, given_s in grace_s.items():
        waits_s = SERVE_DEFAULT_GRACE_S if given_s is None else given_s
        if waits_s < settings.request_timeout_s:
            default = " (Serve's default)" if given_s is None else ""
            raise ConfigError(
                f"{source}: {name} has a graceful_shutdown_timeout_s of {waits_s:g}{default}, and "
                f"a request has a request_timeout_s of {settings.request_timeout_s:g} s: an update "
                "would cut answers that are still in time; raise the first, or lower the second"
            )


def _told(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, e['loc']))}: {e['msg']}"
        + (_suggestion(e["loc"][-1], Settings, ScalingOptions) if _is_unknown(e["type"]) else "")
        for e in error.errors()
    )


def _is_unknown(kind: str) -> bool:
    return kind == "extra_forbidden"


def _unknown_in_policies(content: Mapping[str, Any]) -> list[str]:
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


def _policy_kwargs(application: Mapping[str, Any]) -> Any:
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
        if key not in known and key in NEWER_OPTIONS:
            continue
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
