"""Checks a configuration strictly: an unknown key, which Serve ignores, is an error here."""

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import ServeDeploySchema

from app.errors import MAX_SHOWN, ConfigError
from app.launch.checks import check_application, check_listeners, own_application
from app.serve.scaling import ScalingOptions
from app.settings import Settings

# Options of newer versions of Ray. An older version drops them with a warning
# (app/serve/ray_compatibility.py).
NEWER_OPTIONS = ("max_surge_percent",)
POLICY = "app.serve.scaling:EnsemblePolicy"
# Import paths that configurations of earlier versions name, and where the objects are now.
MOVED = {
    "app.scaling.serve_policy:EnsemblePolicy": POLICY,
    "app.tracing.pipeline:span_processors": "app.telemetry.export:span_processors",
}


def checked_content(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Check every key and value against Serve's schema and ours.

    Returns:
        The content with the schema's types: a number that was written as text is a number.

    Raises:
        ConfigError: it names ``source`` and lists all unknown keys, moved import paths and bad
            values.

    """
    unknown = unknown_keys(content, ServeDeploySchema) + _unknown_in_policies(content)
    if problems := unknown + _moved_paths(content):
        raise ConfigError(f"{source}: " + "; ".join(problems))
    if not content.get("applications"):
        raise ConfigError(f"{source} has no applications; see serve_config.yaml in the project")
    if odd := _unmapped(content["applications"]):
        raise ConfigError(f"{source}: {odd} is no mapping; see serve_config.yaml in the project")
    try:
        checked = _as_validated(content)
        for application in checked["applications"]:
            ScalingOptions.model_validate(_policy_kwargs(application))
        ours = own_application(checked)
        settings = Settings.model_validate(ours.get("args", {}))
        check_listeners(checked, settings.request_timeout_s)
        check_application(ours, settings)
    except ValidationError as error:
        raise ConfigError(f"{source}: {mistakes(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}") from error
    return checked


def _unmapped(applications: Any) -> str | None:
    """Return where an application or a deployment is no mapping, which Serve's schema expects."""
    for number, application in enumerate(applications if isinstance(applications, list) else ()):
        place = f"applications[{number}]"
        if not isinstance(application, dict):
            return place
        deployments = application.get("deployments")
        for index, each in enumerate(deployments if isinstance(deployments, list) else ()):
            if not isinstance(each, dict):
                return f"{place}.deployments[{index}]"
    return None


def _as_validated(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated content, limited to the keys that the file sets."""
    schema = ServeDeploySchema.model_validate(content)
    checked = schema.model_dump(mode="json", exclude_unset=True)
    for application in checked["applications"]:
        for deployment in application.get("deployments", []):
            if scaling := deployment.get("autoscaling_config"):  # any mapping is valid here
                is_auto = deployment.get("num_replicas") == "auto"
                auto: AutoscalingConfig = AutoscalingConfig.default()  # type: ignore[no-untyped-call]
                defaults = auto.model_dump(exclude_unset=True) if is_auto else {}
                whole = AutoscalingConfig.model_validate(defaults | scaling)
                dumped = whole.model_dump(mode="json", exclude_unset=True)
                deployment["autoscaling_config"] = {name: dumped[name] for name in scaling}
    return checked


def mistakes(error: ValidationError) -> str:
    """Return the mistakes in a configuration as one line."""
    return "; ".join(
        _place(e["loc"])
        + e["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list, as [A, B]")
        + _value_of(e["type"], e["input"])
        + (
            _suggestion(e["loc"][-1], Settings, ScalingOptions)
            if e["type"] == "extra_forbidden"
            else ""
        )
        for e in error.errors()
    )


def _value_of(kind: str, value: Any) -> str:
    """Return the value of a mistake; nothing for a mapping, or where the message has it."""
    is_shown = kind not in ("value_error", "extra_forbidden", "missing")
    is_plain = isinstance(value, str | int | float | None)
    return f", not {str(value)[:MAX_SHOWN]!r}" if is_shown and is_plain else ""


def _place(keys: tuple[int | str, ...]) -> str:
    """Return where a mistake is; nothing for one of values that do not go together."""
    return f"{'.'.join(map(str, keys))}: " if keys else ""


def _unknown_in_policies(content: Mapping[str, Any]) -> list[str]:
    """Return the unknown keys in autoscaling_policy, which Serve's schema does not check."""
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


def _moved_paths(content: Any, where: str = "") -> list[str]:
    """Return a line per import path of an earlier version, at every depth, with today's path."""
    if isinstance(content, dict):
        inner = [(f"{where}.{key}" if where else str(key), value) for key, value in content.items()]
    elif isinstance(content, list):
        inner = [(f"{where}[{index}]", value) for index, value in enumerate(content)]
    else:
        new = MOVED.get(content) if isinstance(content, str) else None
        return [f"{where} is {content}, which has moved: write {new}"] if new else []
    return [line for place, value in inner for line in _moved_paths(value, place)]


def _policy_kwargs(application: Mapping[str, Any]) -> Any:
    """Return the arguments of our autoscaling policy; {} if the file names another policy."""
    policy = application.get("autoscaling_policy") or {}
    return policy.get("policy_kwargs", {}) if policy.get("policy_function") == POLICY else {}


def _suggestion(key: object, *models: type[BaseModel]) -> str:
    known = [field for model in models for field in model.model_fields]
    close = difflib.get_close_matches(str(key), known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_keys(content: Any, model: type[BaseModel], where: str = "") -> list[str]:
    """Compare a parsed file with a pydantic model at every depth; return a line per unknown key."""
    if not isinstance(content, dict):
        return []
    known = dict(model.model_fields)
    problems = []
    for key, value in content.items():
        place = f"{where}.{key}" if where else str(key)
        if key not in known and key in NEWER_OPTIONS:
            continue
        if key not in known:
            problems.append(f"{place} is no option{_suggestion(key, model)}")
            continue
        for inner in _models_in(known[key].annotation):
            rows = value if isinstance(value, list) else [value]
            for index, row in enumerate(rows):
                spot = f"{place}[{index}]" if isinstance(value, list) else place
                problems += unknown_keys(row, inner, spot)
    return problems


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models an annotation names: ``X``, ``X | None``, ``list[X]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
