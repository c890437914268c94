"""The configuration to serve: a serve_config.yaml, read, checked strictly, and changed on copies.

An unknown key, which Serve ignores, is an error here. Importing this module must not import ray,
which reads its environment when it is imported (:mod:`app.launch.run_folder`). Reading a
configuration does import ray.
"""

import copy
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import BaseModel, ValidationError

from app.environment import PROJECT
from app.errors import MAX_SHOWN, ConfigError
from app.launch.checks import (
    HUBS,
    HttpOptions,
    check_application,
    check_listeners,
    own_application,
    own_index,
)
from app.settings import Settings
from models.manifest import Manifest
from models.record import YamlError, read_yaml

CONFIG_NAME = "serve_config.yaml"
ADD_SERVICER = "app.grpc.call.add_servicer"
EXPORTER = "app.telemetry.export:span_processors"  # of tracing_config
# The generated function, which a file may name instead. With it, Serve receives a message before
# the application can refuse the call.
GENERATED = "app.grpc.tandem_pb2_grpc.add_EnsembleServicer_to_server"
MAX_PORT = 65535
LOOPBACK_OPTIONS = {"host": "127.0.0.1", "port": 8000}  # defaults of http_options
# Options of newer versions of Ray. An older version drops them with a warning
# (app/serve/ray_compatibility.py).
NEWER_OPTIONS = ("max_surge_percent",)
POLICY = "app.serve.scaling:EnsemblePolicy"
# Import paths that configurations of earlier versions name, and where the objects are now.
MOVED = {
    "app.scaling.serve_policy:EnsemblePolicy": POLICY,
    "app.tracing.pipeline:span_processors": EXPORTER,
}


def default_config() -> Path:
    """Return the serve_config.yaml of the working folder, or else the project's."""
    here = Path(CONFIG_NAME)
    # Path.is_file raises in a folder that this account cannot enter.
    return here if os.path.isfile(here) else PROJECT / CONFIG_NAME  # noqa: PTH113


def read_content(path: Path) -> Any:
    """Return the parsed file.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    try:
        return read_yaml(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give --config FILE") from error
    except YamlError as error:
        raise ConfigError(error.message) from error


@dataclass(frozen=True)
class ServeConfig:
    """Ray Serve's options and the application's settings; every change returns a new object.

    ``content`` is Serve's configuration; change only copies of it (:meth:`as_dict`). ``settings``,
    ``http`` and ``grpc_port`` are parsed from it. A file may also have applications that are not
    Tandem's. ``origins`` names the flag, variable or file of each value that is no default.
    """

    content: dict[str, Any]
    settings: Settings
    http: HttpOptions
    grpc_port: int | None  # None: gRPC is off
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a file.

        Raises:
            ConfigError: the file cannot be read, is not YAML, or has an unknown key or a bad value.
        """
        return cls.of(read_content(path), str(path))

    @classmethod
    def of(cls, content: Any, source: str = "the configuration") -> Self:
        """Check content that was read from ``source``.

        Without a host the service listens on loopback; Serve's own default is all interfaces.
        """
        if not isinstance(content, dict):
            raise ConfigError(
                f"{source} is empty or not a mapping; see serve_config.yaml in the project"
            )
        checked, settings = checked_content(content, source)
        checked["http_options"] = LOOPBACK_OPTIONS | checked.get("http_options", {})
        return cls(checked, settings, *_listeners(checked))

    def changed(
        self,
        *,
        http: Mapping[str, Any] | None = None,
        grpc_port: int | None = None,
        deployments: Sequence[Mapping[str, Any]] | None = None,
        **settings: Any,
    ) -> Self:
        """Return a copy with these settings and options; None leaves a part as it is.

        ``http`` and ``settings`` are merged. None takes an option of ``http`` out.

        Raises:
            ConfigError: the changed settings do not fit each other.
        """
        content = with_grpc(self.as_dict(), grpc_port)
        options = content["http_options"] | dict(http or {})
        content["http_options"] = {n: value for n, value in options.items() if value is not None}
        ours = content["applications"][own_index(content)]
        if deployments is not None:
            ours["deployments"] = [*map(copy.deepcopy, deployments)]  # each with parts of its own
        parsed = self.settings
        if settings:
            ours["args"] = changed_arguments(ours.get("args", {}), copy.deepcopy(settings))
            try:
                parsed = Settings.model_validate(ours["args"])
            except ValidationError as error:  # of values that fit the file, and not each other
                raise ConfigError(f"args: {mistakes(error)}") from error
        return type(self)(content, parsed, *_listeners(content), self.origins)

    def as_dict(self) -> dict[str, Any]:
        """Return a copy of the content, for changes, for YAML and for Serve's schema."""
        return copy.deepcopy(self.content)

    @property
    def application_names(self) -> list[str]:
        return [application.get("name", "default") for application in self.content["applications"]]

    @property
    def name(self) -> str:
        return str(self._application.get("name", "default"))

    @property
    def deployments(self) -> list[Mapping[str, Any]]:
        """The options of every deployment, of all applications."""
        return [d for of in self.content["applications"] for d in of.get("deployments", [])]

    @property
    def url(self) -> str:
        """The URL at which this machine reaches the application."""
        where = self.http.address(self.http.port)
        return f"{self.http.scheme}://{where}{self.route_prefix.rstrip('/')}"

    @property
    def route_prefix(self) -> str:
        return str(self._application.get("route_prefix") or "/")

    def fitted_to(self, manifest: Manifest) -> Self:
        """Fit the deployments to the set's members and to the places where the stages run.

        Serve refuses options of deployments that do not exist. So this removes the options of
        stages that are not used or run in the Gateway's process, and of members that the set lacks.
        A member without options takes those of the first member removed, so that the file's
        intentions hold for any set.
        """
        stages, members = self._stages() | self._hubs(), self._members(manifest)
        every = self._application.get("deployments", [])
        kept = [d for d in every if d["name"] in members | stages]
        known = {*members, *stages, "Decoder", "Combiner", *HUBS}
        if gone := [d for d in every if d["name"] not in known]:
            missing = members - {d["name"] for d in kept}
            kept += [{**gone[0], "name": name} for name in sorted(missing)]
        return self.changed(deployments=kept)

    def all_deployments(self, manifest: Manifest) -> list[Mapping[str, Any]]:
        """Return the options of all deployments, those with Serve's defaults included."""
        names = {deployment["name"] for deployment in self.deployments}
        unnamed = sorted((self._stages() | self._members(manifest)) - names)
        return [*self.deployments, *({"name": name} for name in unnamed)]

    def _stages(self) -> set[str]:
        """Return the stages, without members, that are deployments of their own."""
        places = {"Decoder": self.settings.decoder, "Combiner": self.settings.combiner}
        return {"Gateway"} | {name for name, place in places.items() if place == "deployment"}

    def _hubs(self) -> set[str]:
        """Return the deployments that all Gateways share."""
        is_used = {
            "Feedback": self.settings.feedback,
            "Samples": self.settings.keeps_photographs,
            "Traffic": self.settings.has_versions,
            "Sets": self.settings.model_sets is not None,
        }
        return {name for name in HUBS if is_used[name]}

    def _members(self, manifest: Manifest) -> set[str]:
        """Return the members that are deployments of their own."""
        is_apart = self.settings.members == "deployment"
        return {member.name for member in manifest.members} if is_apart else set()

    @property
    def _application(self) -> Mapping[str, Any]:
        return own_application(self.content)


def changed_arguments(args: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with ``changes``; ``model_set`` and ``model_sets`` replace each other."""
    sets = {"model_set", "model_sets"}
    gone = sets if sets & changes.keys() else set()
    return {name: value for name, value in args.items() if name not in gone} | dict(changes)


def with_grpc(content: dict[str, Any], port: int | None) -> dict[str, Any]:
    """Return the configuration with gRPC on ``port``; None keeps the file's port."""
    options = dict(content.get("grpc_options", {}))
    functions = options.get("grpc_servicer_functions", [])
    if port is not None:
        options |= {"port": port, "grpc_servicer_functions": [ADD_SERVICER]}
    elif GENERATED in functions:
        own = [ADD_SERVICER if name == GENERATED else name for name in functions]
        options["grpc_servicer_functions"] = own
    else:
        return content
    return {**content, "grpc_options": options}


def _listeners(content: Mapping[str, Any]) -> tuple[HttpOptions, int | None]:
    """Return the options of HTTP and the port of gRPC, None if gRPC is off.

    Raises:
        ConfigError: a port is out of range, or the host is no address.
    """
    from ray.serve.schema import gRPCOptionsSchema

    http = HttpOptions.model_validate(content["http_options"])
    grpc = gRPCOptionsSchema.model_validate(content.get("grpc_options", {}))
    port = grpc.port if grpc.grpc_servicer_functions else None
    for name, number in (("http_options", http.port), ("grpc_options", port)):
        if number is not None and not 1 <= number <= MAX_PORT:
            raise ConfigError(f"{name}.port is {number}: give 1 to {MAX_PORT}")
    return http, port


def checked_content(content: Mapping[str, Any], source: str) -> tuple[dict[str, Any], Settings]:
    """Check every key and value against Serve's schema and ours.

    Returns:
        The content with the schema's types, where a number written as text is a number, and the
        settings of our application.

    Raises:
        ConfigError: it names ``source`` and lists all unknown keys, moved import paths and bad
            values.
    """
    from ray.serve.schema import ServeDeploySchema

    from app.serve.scaling import ScalingOptions

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
            policy = application.get("autoscaling_policy") or {}
            if policy.get("policy_function") == POLICY:
                ScalingOptions.model_validate(policy.get("policy_kwargs", {}))
        ours = own_application(checked)
        settings = Settings.model_validate(ours.get("args", {}))
        check_listeners(checked, settings.request_timeout_s)
        check_application(ours, settings)
    except ValidationError as error:
        raise ConfigError(f"{source}: {mistakes(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}") from error
    return checked, settings


def _unmapped(applications: Any) -> str | None:
    """Return where an application or a deployment is no mapping, which Serve's schema expects."""
    for place, application in _listed("applications", applications):
        if not isinstance(application, dict):
            return place
        for inner, deployment in _listed(f"{place}.deployments", application.get("deployments")):
            if not isinstance(deployment, dict):
                return inner
    return None


def _listed(place: str, value: Any) -> list[tuple[str, Any]]:
    """Return the items of a list with the place of each; [] for another value."""
    items = value if isinstance(value, list) else ()
    return [(f"{place}[{index}]", item) for index, item in enumerate(items)]


def _as_validated(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated content, limited to the keys that the file sets."""
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

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
    return "; ".join(_mistake(**details) for details in error.errors())


def _mistake(*, type: str, loc: tuple[int | str, ...], msg: str, input: Any, **_: Any) -> str:
    """Return a mistake of pydantic's with its place, and with its value if the message lacks it."""
    from app.serve.scaling import ScalingOptions

    text = msg.removeprefix("Value error, ").replace("a valid tuple", "a list, as [A, B]")
    if type == "extra_forbidden":
        text += _suggestion(loc[-1], Settings, ScalingOptions)
    elif type not in ("value_error", "missing") and isinstance(input, str | int | float | None):
        text += f", not {str(input)[:MAX_SHOWN]!r}"
    return ": ".join(filter(None, (".".join(map(str, loc)), text)))


def _unknown_in_policies(content: Mapping[str, Any]) -> list[str]:
    """Return the unknown keys in autoscaling_policy, which Serve's schema does not check."""
    from ray.serve.config import AutoscalingPolicy

    lines = []
    for place, application in _listed("applications", content.get("applications")):
        if isinstance(application, dict):
            policy = application.get("autoscaling_policy")
            lines += unknown_keys(policy, AutoscalingPolicy, f"{place}.autoscaling_policy")
    return lines


def _moved_paths(content: Any, where: str = "") -> list[str]:
    """Return a line per import path of an earlier version, at every depth, with today's path."""
    if isinstance(content, dict):
        inner = [(f"{where}.{key}" if where else str(key), value) for key, value in content.items()]
    elif isinstance(content, list):
        inner = _listed(where, content)
    else:
        new = MOVED.get(content) if isinstance(content, str) else None
        return [f"{where} is {content}, which has moved: write {new}"] if new else []
    return [line for place, value in inner for line in _moved_paths(value, place)]


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
        if key in known:
            rows = _listed(place, value) if isinstance(value, list) else [(place, value)]
            for inner in _models_in(known[key].annotation):
                for spot, row in rows:
                    problems += unknown_keys(row, inner, spot)
        elif key not in NEWER_OPTIONS:
            problems.append(f"{place} is no option{_suggestion(key, model)}")
    return problems


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models an annotation names: ``X``, ``X | None``, ``list[X]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
