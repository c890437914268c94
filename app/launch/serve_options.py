"""The options of ``tandem serve``: each a flag, else a variable, else the file's.

``TANDEM_<SETTING>`` is written as in the file. Only this module reads these variables; replicas get
the result, with absolute paths. The origin of each value is kept for ``--print-config``.
"""

import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from app.environment import (
    CALLERS_KEY_VARIABLE,
    GATEWAY_TIMEOUT,
    HAPROXY_SECRET,
    KEYS_VARIABLE,
    ON_LOOPBACK,
    REGIONS_FOLDER,
    environment_value,
    whole_environment,
)
from app.errors import MAX_SHOWN, ConfigError
from app.launch.checks import SSL_FILES, own_index
from app.launch.config import (
    ServeConfig,
    changed_arguments,
    default_config,
    read_content,
    with_grpc,
)
from app.launch.log_and_metrics import LogFormat, LogLevel
from app.setting_values import RETIRED
from app.settings import Settings
from models.ensemble import PlanName
from models.files import why_not_written, with_home
from models.record import parse_yaml
from models.stores import is_url

PREFIX = "TANDEM_"
OURS = {REGIONS_FOLDER, ON_LOOPBACK, GATEWAY_TIMEOUT, HAPROXY_SECRET}
NO_SETTINGS = {KEYS_VARIABLE, CALLERS_KEY_VARIABLE, *OURS} | {
    "TANDEM_FORK_SERVER",  # and variables of tests:
    *("TANDEM_CHROMIUM", "TANDEM_REDIS_SERVER", "TANDEM_KSERVE_PYTHON", "TANDEM_TEST_DATA"),
    *(
        "TANDEM_NEIGHBOURS_PYTHON",
        "TANDEM_TEST_BASE_IMAGE",
        "TANDEM_PHOTOS",
        "TANDEM_KEY_FILE",
        "TANDEM_LOAD_NETWORK",
    ),
    "TANDEM_URL",
}
UNIONS = (UnionType, Union)
SETS = ("model_set", "model_sets")
HOSTS_PORTS = ("AIP_HTTP_PORT", "SAGEMAKER_BIND_TO_PORT")
# The options of the command line that change the configuration.
OF_SETTINGS = ("precision", "plan", "allow_unverified", "api_keys_file")
CHANGING = ("model_set", *OF_SETTINGS, "host", "port", "grpc_port")
PASSWORD = re.compile(r"//[^/@\s]*@")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of ``tandem serve``; None keeps the configuration's value."""

    model_set: Annotated[str | None, typer.Option(help="name of a set, or its folder")] = None
    precision: Annotated[
        Literal["INT8", "FP16", "auto"] | None,
        typer.Option(help="which networks of the set  (default: INT8)"),
    ] = None
    plan: Annotated[
        PlanName | None,
        typer.Option(help="fast asks fewer members where fewer suffice  (default: full)"),
    ] = None
    config: Annotated[
        Path | None, typer.Option(help="Ray Serve configuration  (default: serve_config.yaml)")
    ] = None
    host: Annotated[
        str | None, typer.Option(help="address to listen on; 0.0.0.0 serves other machines")
    ] = None
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="HTTP port  (default: 8000)")
    ] = None
    address: Annotated[
        str | None, typer.Option(help="running Ray cluster to deploy to: auto, or HOST:PORT")
    ] = None
    allow_unverified: Annotated[
        bool | None,
        typer.Option(
            help="serve a set even if INT8 lost more than its max_drop  (default: refuse it)"
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="port for Prometheus  (default: 9464, or a free one)"),
    ] = None
    metrics_host: Annotated[
        str | None, typer.Option(help="0.0.0.0 admits a Prometheus elsewhere  (default: loopback)")
    ] = None
    metrics_key_file: Annotated[
        Path | None,
        typer.Option(help="show metrics, then with names of keys, only to those with its key"),
    ] = None
    api_keys_file: Annotated[
        Path | None, typer.Option(help="answer only requests with a key of this file, one a line")
    ] = None
    grpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="gRPC port  (default: no gRPC)")
    ] = None
    portable: Annotated[
        bool | None,
        typer.Option(help="serve without HAProxy, on loopback only  (default: except on Linux)"),
    ] = None
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help="format on stderr  (default: text in a terminal, otherwise json)"),
    ] = None
    log_level: Annotated[
        LogLevel | None,
        typer.Option(help="debug: Ray's own lines too  (default: info, in a terminal warning)"),
    ] = None


OPTIONS = tuple(option.name for option in fields(ServeOptions))


def read_config(options: ServeOptions, flags: Collection[str] = OPTIONS) -> ServeConfig:
    """Read the file, then apply the variables, then the options of the command line.

    The file is checked, changed once, and checked again with what changed it.

    ``flags`` are the options given as flags; the others come from variables.

    Raises:
        ConfigError: the file, a variable or an option has a bad value; the message names them.
    """
    path = options.config or default_config()
    of_file = ServeConfig.of(raw := read_content(path), str(path))
    asked = {name: value for name, value in vars(options).items() if value is not None}
    by_option = {name: flag_of(name) if name in flags else variable_of(name) for name in asked}
    variables = settings_of_environment()
    if all(variables.get(name) is not None for name in SETS):
        both = " and ".join(map(variable_of, SETS))
        raise ConfigError(f"{both} both name the served sets: leave one of them out")
    content = with_grpc(of_file.as_dict(), options.grpc_port)
    host_variable = None if "port" in asked else host_port_variable()
    if host_variable is not None:
        content["http_options"]["port"] = port_in(host_variable)
    content["http_options"] |= {name: asked[name] for name in ("host", "port") if name in asked}
    if options.log_format == "json":
        content["logging_config"] = {**(content.get("logging_config") or {}), "encoding": "JSON"}
    ours = content["applications"][own_index(content)]
    ours["args"], of_settings = _layered(
        (ours.get("args", {}), lambda _: str(path)),
        (variables, variable_of),
        (_settings_of(asked), lambda name: by_option.get(name) or by_option["model_set"]),
    )
    changes = [*map(variable_of, variables), *(by_option[n] for n in CHANGING if n in asked)]
    source = " with ".join(filter(None, (str(path), ", ".join(dict.fromkeys(changes)))))
    http = raw.get("http_options") or {}
    origins = {name: str(path) for name in ("host", "port") if name in http}
    if host_variable is not None:
        origins["port"] = host_variable
    if of_file.grpc_port is not None:
        origins["grpc_port"] = str(path)
    return replace(ServeConfig.of(content, source), origins=origins | by_option | of_settings)


def host_port_variable() -> str | None:
    """Return the variable in which Vertex AI or SageMaker says the port; None if none is set."""
    return next((name for name in HOSTS_PORTS if environment_value(name)), None)


def port_in(variable: str) -> int:
    """Return the port in a variable; raise :class:`ConfigError` if it is none."""
    text = environment_value(variable) or ""
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 65536):
        raise ConfigError(f"{variable} is {text[:MAX_SHOWN]!r}: a port is wanted, 1 to 65535")
    return int(text)


def _settings_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among the options of the command line."""
    named = {name: value for name, value in asked.items() if name in OF_SETTINGS}
    return named | (sets_of(asked["model_set"]) if "model_set" in asked else {})


def sets_of(asked: str) -> dict[str, Any]:
    """Return the argument for ``a`` or ``a,b``; an existing folder's name may contain a comma."""
    names = [name.strip() for name in asked.split(",")]
    if len(names) == 1 or os.path.isdir(asked):  # noqa: PTH112  # Path's raises for a long line
        return {"model_set": asked}
    if not all(names):
        raise ConfigError(f"--model-set {asked!r} has an empty name; separate names by one comma")
    return {"model_sets": names}


def _layered(
    *layers: tuple[Mapping[str, Any], Callable[[str], str]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge layers of settings, the last one first; return them and the origin of each.

    A layer has its settings, and a function from a setting's name to its origin.
    """
    args: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for values, origin_of in layers:
        args = changed_arguments(args, values)
        of_sets = next((origin_of(name) for name in SETS if name in values), None)
        if of_sets is not None:  # each of them replaces the other
            origins |= {name: of_sets for name in SETS if name in origins}
        origins |= {name: origin_of(name) for name in values}
    for decides in ("traffic", "model_sets"):
        if args.get(decides) is not None:  # it names the first set too
            origins["model_set"] = origins[decides]
            break
    if args.get("api_keys_file") is not None:  # a replica has another working directory
        args["api_keys_file"] = absolute(args["api_keys_file"])
    return args, origins


def resolved(options: ServeOptions, flags: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the value and source of every option and setting, with passwords removed."""
    config = read_config(options, flags)
    values = {**vars(options), "config": options.config or default_config()}
    values |= {"host": config.http.host, "port": config.http.port, "grpc_port": config.grpc_port}
    return {
        name: {
            "value": PASSWORD.sub("//***@", str(value)) if isinstance(value, str | Path) else value,
            "source": config.origins.get(name, "default"),
        }
        for name, value in (values | config.settings.model_dump(mode="json")).items()
    }


def flag_of(name: str) -> str:
    """Return the flag of an option of the command line."""
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    """Return the name of the variable for an option or a setting."""
    return f"{PREFIX}{name.upper()}"


def settings_of_environment() -> dict[str, Any]:
    """Return the settings that variables set; an empty variable counts as not set."""
    environment = whole_environment()
    return {
        name: _value(name, text)
        for name in Settings.model_fields
        if (text := environment.get(variable_of(name)))
    }


def _value(name: str, text: str) -> Any:
    """Parse a variable's value: texts and paths as they are, everything else as YAML."""
    annotation = Settings.model_fields[name].annotation
    kinds = get_args(annotation) if get_origin(annotation) in UNIONS else (annotation,)
    if text == "null" and NoneType in kinds:
        return None
    return text if {str, Path} & set(kinds) else parse_yaml(text, variable_of(name))


def unknown_variables() -> list[str]:
    """Return a warning for each variable with our prefix that is not a setting."""
    names = (*Settings.model_fields, *OPTIONS)
    settings = {name.upper() for name in names}
    warnings = []
    for variable in sorted(whole_environment().keys() - NO_SETTINGS):
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and name not in settings:
            close = difflib.get_close_matches(name, settings, 1)
            hint = f"did you mean {PREFIX}{close[0]}?" if close else "--print-config names all"
            hint = RETIRED.get(name.lower(), hint)
            warnings.append(f"{variable} is no setting and changes nothing; {hint}")
    return warnings


def with_usable_paths(config: ServeConfig) -> tuple[ServeConfig, str | None]:
    """Make paths absolute, and drop a compile_cache that cannot be written to, with a warning.

    Ray's processes run in another working folder than the command. Some accounts have no writable
    home: a container's root may be read-only.
    """
    settings, warning = config.settings, None
    paths = _absolute_paths(settings)
    cache = paths.get("compile_cache", settings.compile_cache)
    is_off = cache is None and "compile_cache" in settings.model_fields_set
    if not is_off and (reason := why_not_written(cache)) is not None:
        paths["compile_cache"] = None
        warning = f"compile_cache: {reason}: networks are compiled at each start"
    files = {name: absolute(file) for name in SSL_FILES if (file := getattr(config.http, name))}
    return config.changed(http=files, **paths), warning


def _absolute_paths(settings: Settings) -> dict[str, Any]:
    """Return the settings that name files, folders or sets, as absolute paths."""
    paths: dict[str, Any] = {
        name: absolute(path)
        for name in ("compile_cache", "api_keys_file", "teach_dir")
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
    return paths


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
