"""The configuration to serve: a serve_config.yaml, read and checked once, with absolute paths.

Importing this module must not import ray, which reads its environment when it is imported (see
:mod:`app.launch.run_folder`). Reading a configuration does import ray.

Ray's processes have another working folder than the command, so relative paths are made absolute.
Folders that cannot be written to are dropped: some accounts have no writable home, and a
container's root may be read-only.
"""

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from app.environment import PROJECT, REGIONS_FOLDER, set_environment
from app.errors import ConfigError
from app.launch.checks import HUBS, SSL_FILES, SSL_OPTIONS, HttpOptions, own_application, own_index
from app.settings import Settings
from models.files import with_home
from models.manifest import Manifest
from models.record import YamlError, read_yaml
from models.stores import is_url

CONFIG_NAME = "serve_config.yaml"
ADD_SERVICER = "app.grpc.call.add_servicer"
EXPORTER = "app.telemetry.export:span_processors"  # of tracing_config
# The generated function, which a file may name instead. With it, Serve receives a message before
# the application can refuse the call.
GENERATED = "app.grpc.tandem_pb2_grpc.add_EnsembleServicer_to_server"
MAX_PORT = 65535
LOOPBACK_OPTIONS = {"host": "127.0.0.1", "port": 8000}  # defaults of http_options


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


def grpc_port(content: dict[str, Any]) -> int | None:
    """Return the port of gRPC; None if gRPC is off."""
    from ray.serve.schema import gRPCOptionsSchema

    options = gRPCOptionsSchema.model_validate(content.get("grpc_options", {}))
    return options.port if options.grpc_servicer_functions else None


@dataclass(frozen=True)
class ServeConfig:
    """Ray Serve's options and the application's settings; every change returns a new object.

    ``content`` is Serve's configuration; change only copies of it (:meth:`as_dict`). The other
    fields are parsed from it. A file may also have applications that are not Tandem's.
    """

    content: dict[str, Any]
    settings: Settings
    http: HttpOptions
    grpc_port: int | None  # None: gRPC is off

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
        from app.launch.config_check import checked_content  # it imports ray

        if not isinstance(content, dict):
            raise ConfigError(
                f"{source} is empty or not a mapping; see serve_config.yaml in the project"
            )
        checked = checked_content(content, source)
        return cls._parsed(
            {**checked, "http_options": LOOPBACK_OPTIONS | checked.get("http_options", {})}
        )

    @classmethod
    def _parsed(cls, content: dict[str, Any]) -> Self:
        from app.launch.config_check import mistakes  # it imports ray

        try:
            settings = Settings.model_validate(own_application(content).get("args", {}))
        except ValidationError as error:  # of values that fit the file, and not each other
            raise ConfigError(f"args: {mistakes(error)}") from error
        http, port = HttpOptions.model_validate(content["http_options"]), grpc_port(content)
        for name, number in (("http_options", http.port), ("grpc_options", port)):
            if number is not None and not 1 <= number <= MAX_PORT:
                raise ConfigError(f"{name}.port is {number}: give 1 to {MAX_PORT}")
        own = copy.deepcopy(content)  # parts of it may be the caller's
        return cls(content=own, settings=settings, http=http, grpc_port=port)

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
        return [
            deployment
            for application in self.content["applications"]
            for deployment in application.get("deployments", [])
        ]

    @property
    def has_own_tracing(self) -> bool:
        """Whether Serve's tracing is on, with the exporter of our settings."""
        tracing = self.content.get("tracing_config") or {}
        return bool(tracing.get("enabled")) and tracing.get("exporter_import_path") == EXPORTER

    @property
    def url(self) -> str:
        """The URL at which this machine reaches the application."""
        where = self.http.address(self.http.port)
        return f"{self.http.scheme}://{where}{self.route_prefix.rstrip('/')}"

    @property
    def route_prefix(self) -> str:
        return str(self._application.get("route_prefix") or "/")

    def with_overrides(
        self,
        *,
        model_set: str | None = None,
        host: str | None = None,
        port: int | None = None,
        grpc_port: int | None = None,
    ) -> Self:
        """Return the configuration with the command line's values; None keeps the file's value."""
        asked = {"host": host, "port": port}
        http = {name: value for name, value in asked.items() if value is not None}
        content = self.with_http_options(**http).as_dict()
        changed = self._parsed(with_grpc(content, grpc_port))
        if model_set is None:
            return changed
        return changed.with_arguments(**_sets_of(model_set))

    def with_http_options(self, **options: Any) -> Self:
        content = self.as_dict()
        content["http_options"] |= options
        return self._parsed(content)

    def with_json_log(self) -> Self:
        """Make Serve log JSON, in place of the file's log format."""
        content = self.as_dict()
        content["logging_config"] = {**(content.get("logging_config") or {}), "encoding": "JSON"}
        return self._parsed(content)

    def without_tracing(self) -> Self:
        """Switch Serve's tracing off."""
        return self._parsed(self.as_dict() | {"tracing_config": {"enabled": False}})

    def with_arguments(self, **arguments: Any) -> Self:
        """Change settings of the application (its ``args``)."""
        args = self._application.get("args", {})
        return self._with_application(args=changed_arguments(args, arguments))

    def fitted_to(self, manifest: Manifest) -> Self:
        """Fit the deployments to the set's members and to the places where the stages run.

        Serve refuses options of deployments that do not exist. So this removes the options of
        stages that are not used or run in the Gateway's process, and of members that the set lacks.
        A member without options takes those of the first member removed, so that the file's
        intentions hold for any set.
        """
        stages, members = self._stages() | self._hubs(), self._members(manifest)
        deployments = [
            d
            for d in self._application.get("deployments", [])
            if d["name"] not in {"Decoder", "Combiner", *HUBS} - stages
        ]
        kept = [d for d in deployments if d["name"] in members | stages]
        gone = [d for d in deployments if d["name"] not in members | stages]
        missing = members - {d["name"] for d in kept}
        if gone:
            kept += [copy.deepcopy(gone[0]) | {"name": name} for name in sorted(missing)]
        return self._with_application(deployments=kept)

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
            "Traffic": self.settings.has_versions,
            "Sets": self.settings.model_sets is not None,
        }
        return {name for name in HUBS if is_used[name]}

    def _members(self, manifest: Manifest) -> set[str]:
        """Return the members that are deployments of their own."""
        is_apart = self.settings.members == "deployment"
        return {member.name for member in manifest.members} if is_apart else set()

    def without_tls(self) -> Self:
        """Remove the ssl options, for a Serve behind a HAProxy that speaks TLS.

        With them Serve's replicas would speak TLS, but its HAProxy would speak without TLS to
        replicas and clients.
        """
        content = self.as_dict()
        for name in SSL_OPTIONS:
            content["http_options"].pop(name, None)
        return self._parsed(content)

    @property
    def _application(self) -> Mapping[str, Any]:
        return own_application(self.content)

    def _with_application(self, **changed: Any) -> Self:
        content = self.as_dict()
        content["applications"][own_index(content)] |= changed
        return self._parsed(content)


def _sets_of(asked: str) -> dict[str, Any]:
    """Return the argument for ``a`` or ``a,b``; an existing folder's name may contain a comma."""
    names = [name.strip() for name in asked.split(",")]
    if len(names) == 1 or os.path.isdir(asked):  # noqa: PTH112  # Path's raises for a long line
        return {"model_set": asked}
    if not all(names):
        raise ConfigError(f"--model-set {asked!r} has an empty name; separate names by one comma")
    return {"model_sets": names}


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


WITHOUT = {"compile_cache": "networks are compiled at each start"}


def with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Return the configuration with absolute paths."""
    settings = config.settings
    paths: dict[str, Any] = {
        name: absolute(path)
        for name in (*WITHOUT, "api_keys_file")
        if (path := getattr(settings, name)) is not None and name in settings.model_fields_set
    }
    if settings.sample_dir is not None and not is_url(settings.sample_dir):
        paths["sample_dir"] = absolute(settings.sample_dir)
    if settings.model_dirs:
        paths["model_dirs"] = list(map(absolute, settings.model_dirs))
    if settings.traffic is not None:
        paths["traffic"] = {_absolute_set(name): of for name, of in settings.traffic.items()}
    if settings.shadow is not None:
        paths["shadow"] = _absolute_set(settings.shadow)
    if settings.model_sets is not None:
        paths["model_sets"] = list(map(_absolute_set, settings.model_sets))
    elif "/" in settings.model_set:
        paths["model_set"] = _absolute_set(settings.model_set)
    files = {name: file for name in SSL_FILES if (file := getattr(config.http, name))}
    return config.with_arguments(**paths).with_http_options(
        **{name: absolute(file) for name, file in files.items()}
    )


def _absolute_set(name: str) -> str:
    """Return a set's folder as an absolute path; a name or a store's URL stays unchanged."""
    is_folder = "/" in name and not is_url(name)
    return absolute(name) if is_folder else name


def absolute(path: str | Path) -> str:
    """Return the absolute path; ``~`` is a home folder, or stays if there is none."""
    try:
        return str(with_home(path).absolute())
    except FileNotFoundError as error:
        text = f"{path} is relative to a working folder that is gone; give an absolute path"
        raise ConfigError(text) from error


def without_unwritable(config: ServeConfig) -> tuple[ServeConfig, list[str]]:
    """Remove folders that cannot be written to; return the configuration and a warning for each."""
    lost = {name: reason for name in WITHOUT if (reason := _why_not(config, name)) is not None}
    warnings = [f"{name}: {reason}: {WITHOUT[name]}" for name, reason in lost.items()]
    return config.with_arguments(**dict.fromkeys(lost)), warnings


def _why_not(config: ServeConfig, name: str) -> str | None:
    """Return why a setting's folder cannot be written to; None if it can, or is not set."""
    folder: Path | None = getattr(config.settings, name)
    if folder is None:
        is_asked = name in config.settings.model_fields_set
        return None if is_asked else "this account has no home folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot write to {folder} ({error.strerror})"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"cannot write to {folder}"


def make_regions_folder(config: ServeConfig, run_dir: Path) -> None:
    """Make the folder of shared-memory regions for all Gateways, and name it in the environment.

    It is in the run's folder, which only this user can enter and which is removed after the run.
    Call this before Ray starts.
    """
    if config.settings.shared_memory:
        folder = run_dir / "regions"
        folder.mkdir(mode=0o700)
        set_environment({REGIONS_FOLDER: str(folder)}, ours=(REGIONS_FOLDER,))
