"""The configuration that is served: a serve_config.yaml, read and checked once, then immutable.

Importing this module must not import ray, which reads its environment at that moment (see
:mod:`app.launch.isolated_environment`): only reading a configuration does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from app.environment import PROJECT
from app.errors import ConfigError
from app.launch.application_check import own_application, own_index
from app.launch.http_options import SSL_OPTIONS, HttpOptions
from app.settings import Settings
from models.manifest import Manifest
from models.strict_yaml import YamlError, read_yaml

CONFIG_NAME = "serve_config.yaml"
ADD_SERVICER = "app.grpc.servicer.add_servicer"
# What a file may name instead: with it a message is received before anybody is asked.
GENERATED = "app.grpc.tandem_pb2_grpc.add_EnsembleServicer_to_server"
ON_LOOPBACK = {"host": "127.0.0.1", "port": 8000}  # where the file says nothing


def default_config() -> Path:
    """Return the folder's own serve_config.yaml, or else the project's."""
    here = Path(CONFIG_NAME)
    return here if here.is_file() else PROJECT / CONFIG_NAME


@dataclass(frozen=True)
class ServeConfig:
    """Ray Serve's options and the application's settings; every change returns another one.

    ``content`` is what Serve takes (:meth:`as_dict`), read-only however deep; the other fields are
    parsed from it. The application is Tandem's: a file may have others beside it.
    """

    content: Mapping[str, Any]
    settings: Settings
    http: HttpOptions
    grpc_port: int | None  # None: gRPC is off

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a file.

        Raises:
            ConfigError: it cannot be read, is not YAML, or has an unknown key or a bad value.

        """
        try:
            content = read_yaml(path)
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}; give --config FILE"
            ) from error
        except YamlError as error:
            raise ConfigError(error.message) from error
        return cls.of(content, str(path))

    @classmethod
    def of(cls, content: Any, source: str = "the configuration") -> Self:
        """Check content that was read from ``source``; raise :class:`ConfigError` as :meth:`read`.

        Where it names no host, the service is on loopback; Serve's own default is all interfaces.
        """
        from app.launch.config_check import checked_content  # it imports ray

        if not isinstance(content, dict):
            raise ConfigError(
                f"{source} is empty or not a mapping; see serve_config.yaml in the project"
            )
        checked = checked_content(content, source)
        return cls._parsed(
            {**checked, "http_options": ON_LOOPBACK | checked.get("http_options", {})}
        )

    @classmethod
    def _parsed(cls, content: dict[str, Any]) -> Self:
        return cls(
            content=_frozen(content),
            settings=Settings.model_validate(own_application(content).get("args", {})),
            http=HttpOptions.model_validate(content["http_options"]),
            grpc_port=grpc_port(content),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the content as a copy of one's own, as YAML and Serve's schema take it."""
        thawed: dict[str, Any] = _thawed(self.content)
        return thawed

    @property
    def application_names(self) -> list[str]:
        """The names of all applications, as Serve has them."""
        return [application.get("name", "default") for application in self.content["applications"]]

    @property
    def name(self) -> str:
        """The application's name, as Serve has it."""
        return str(self._application().get("name", "default"))

    @property
    def deployments(self) -> list[Mapping[str, Any]]:
        """The options of every deployment, of all applications."""
        return [
            deployment
            for application in self.content["applications"]
            for deployment in application.get("deployments", [])
        ]

    @property
    def has_tracing(self) -> bool:
        """Whether requests are traced."""
        return bool((self.content.get("tracing_config") or {}).get("enabled"))

    @property
    def url(self) -> str:
        """Where this machine reaches the application."""
        where = self.http.address(self.http.port)
        return f"{self.http.scheme}://{where}{self.route_prefix.rstrip('/')}"

    @property
    def route_prefix(self) -> str:
        """What the application's paths begin with."""
        return str(self._application().get("route_prefix") or "/")

    def with_overrides(
        self,
        *,
        model_set: str | None = None,
        host: str | None = None,
        port: int | None = None,
        grpc_port: int | None = None,
    ) -> Self:
        """Put what the command line asks for in its place; None leaves the file's own."""
        asked = {"host": host, "port": port}
        http = {name: value for name, value in asked.items() if value is not None}
        content = self.with_http_options(**http).as_dict()
        changed = self._parsed(with_grpc(content, grpc_port))
        return changed if model_set is None else changed.with_arguments(model_set=model_set)

    def with_http_options(self, **options: Any) -> Self:
        """Change Serve's http_options."""
        content = self.as_dict()
        content["http_options"] |= options
        return self._parsed(content)

    def with_json_log(self) -> Self:
        """Let Serve log JSON, whatever the file says of the form."""
        content = self.as_dict()
        content["logging_config"] = {**content.get("logging_config", {}), "encoding": "JSON"}
        return self._parsed(content)

    def with_arguments(self, **arguments: Any) -> Self:
        """Change settings of the application (its ``args``)."""
        application = self._application()
        return self._with_application(args={**application.get("args", {}), **arguments})

    def deployment(self, name: str) -> dict[str, Any]:
        """Return a copy of a deployment's options; of one without any, its name."""
        given = (d for d in self._application().get("deployments", []) if d["name"] == name)
        return next(given, {"name": name})

    def with_deployment(self, options: Mapping[str, Any]) -> Self:
        """Give the deployment of this name other options; it is added where there was none."""
        deployments = self._application().get("deployments", [])
        names = [d["name"] for d in deployments]
        if options["name"] in names:
            deployments[names.index(options["name"])] = options
        else:
            deployments.append(options)
        return self._with_application(deployments=deployments)

    def fitted_to(self, manifest: Manifest) -> Self:
        """Fit the deployments to the set's members and to where the stages run.

        Serve refuses options of what is not there. So those of stages in the Gateway's process go,
        and those of members that the set lacks. A member without options takes those of the first
        member that went, so a set of any members is served with the file's intentions.
        """
        stages, members = self._stages(), self._members(manifest)
        deployments = [
            d
            for d in self._application().get("deployments", [])
            if d["name"] not in {"Decoder", "Combiner"} - stages
        ]
        kept = [d for d in deployments if d["name"] in members | stages]
        gone = [d for d in deployments if d["name"] not in members | stages]
        missing = members - {d["name"] for d in kept}
        if gone:
            kept += [{**gone[0], "name": name} for name in sorted(missing)]
        return self._with_application(deployments=kept)

    def all_deployments(self, manifest: Manifest) -> list[Mapping[str, Any]]:
        """Return the options of all deployments, also of those that are left to Serve's."""
        names = {deployment["name"] for deployment in self.deployments}
        unnamed = sorted((self._stages() | self._members(manifest)) - names)
        return [*self.deployments, *({"name": name} for name in unnamed)]

    def _stages(self) -> set[str]:
        """Return the stages beside members that are deployments of their own."""
        places = {"Decoder": self.settings.decoder, "Combiner": self.settings.combiner}
        return {"Gateway"} | {name for name, place in places.items() if place == "deployment"}

    def _members(self, manifest: Manifest) -> set[str]:
        """Return the members that are deployments of their own."""
        is_apart = self.settings.members == "deployment"
        return {member.name for member in manifest.members} if is_apart else set()

    def without_tls(self) -> Self:
        """Take the ssl options away: what Serve gets where HAProxy speaks TLS in its place.

        Serve would hand them to the replicas, which then speak TLS, while its HAProxy speaks to
        them without and to clients without.
        """
        content = self.as_dict()
        for name in SSL_OPTIONS:
            content["http_options"].pop(name, None)
        return self._parsed(content)

    def _application(self) -> dict[str, Any]:
        application: dict[str, Any] = _thawed(own_application(self.content))
        return application

    def _with_application(self, **changed: Any) -> Self:
        content = self.as_dict()
        content["applications"][own_index(content)] |= _thawed(changed)
        return self._parsed(content)


def with_grpc(content: dict[str, Any], port: int | None) -> dict[str, Any]:
    """Return the configuration with the interface on ``port``; None leaves the file's own."""
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


def grpc_port(content: dict[str, Any]) -> int | None:
    """Return the port that gRPC will have; None if it is off."""
    from ray.serve.schema import gRPCOptionsSchema

    options = gRPCOptionsSchema.model_validate(content.get("grpc_options", {}))
    return options.port if options.grpc_servicer_functions else None


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return MappingProxyType({key: _frozen(inner) for key, inner in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _thawed(inner) for key, inner in value.items()}
    return list(map(_thawed, value)) if isinstance(value, list | tuple) else value
