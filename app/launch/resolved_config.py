"""Resolves each option of ``tandem serve``: a flag, else a variable, else the file.

``TANDEM_<SETTING>`` is written as in the file. Only this module reads these variables; replicas get
the result.
"""

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer

from app.environment import (
    CALLERS_KEY_VARIABLE,
    GATEWAY_TIMEOUT,
    KEYS_VARIABLE,
    ON_LOOPBACK,
    REGIONS_FOLDER,
    whole_environment,
)
from app.launch.checks import own_application, own_index
from app.launch.config import ServeConfig, absolute, changed_arguments, default_config, read_content
from app.launch.log import LogFormat
from app.setting_values import RETIRED
from app.settings import Settings
from models.record import parse_yaml

PREFIX = "TANDEM_"
OURS = {REGIONS_FOLDER, ON_LOOPBACK, GATEWAY_TIMEOUT}
NO_SETTINGS = {KEYS_VARIABLE, CALLERS_KEY_VARIABLE, *OURS} | {
    "TANDEM_FORK_SERVER",  # and variables of tests:
    *("TANDEM_CHROMIUM", "TANDEM_REDIS_SERVER", "TANDEM_KSERVE_PYTHON", "TANDEM_TEST_DATA"),
    *(
        "TANDEM_TEST_BASE_IMAGE",
        "TANDEM_PHOTOS",
        "TANDEM_KEY_FILE",
        "TANDEM_LOAD_NETWORK",
        "TANDEM_URL",
    ),
}
UNIONS = (UnionType, Union)
SETS = ("model_set", "model_sets")
PASSWORD = re.compile(r"//[^/@\s]*@")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of ``tandem serve``; None keeps the configuration's value."""

    model_set: Annotated[str | None, typer.Option(help="name of a set, or its folder")] = None
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
        str | None,
        typer.Option(help="0.0.0.0 admits a Prometheus elsewhere  (default: loopback)"),
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


def read_config(options: ServeOptions) -> ServeConfig:
    """Read the file, then apply the variables, then the options of the command line.

    Raises:
        ConfigError: the file or a variable has a bad value; the message names both.

    """
    path = options.config or default_config()
    return _changed(ServeConfig.read(path), path, options)


def _changed(config: ServeConfig, path: Path, options: ServeOptions) -> ServeConfig:
    if variables := settings_of_environment():
        content = config.as_dict()
        ours = content["applications"][own_index(content)]
        ours["args"] = changed_arguments(ours.get("args", {}), variables)
        config = ServeConfig.of(content, f"{path} with {', '.join(map(variable_of, variables))}")
    config = config.with_overrides(
        model_set=options.model_set,
        host=options.host,
        port=options.port,
        grpc_port=options.grpc_port,
    )
    if options.allow_unverified is not None:
        config = config.with_arguments(allow_unverified=options.allow_unverified)
    keys = options.api_keys_file or config.settings.api_keys_file
    # A replica has another working directory.
    return config if keys is None else config.with_arguments(api_keys_file=absolute(keys))


def resolved(options: ServeOptions, flags: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the value and source of every option and setting, with passwords removed.

    ``flags`` are the options given as flags.
    """
    path = options.config or default_config()
    content = read_content(path)  # once: it may be a pipe
    config = _changed(ServeConfig.of(content, str(path)), path, options)
    in_file = {**(content.get("http_options") or {}), **own_application(content).get("args", {})}
    if config.grpc_port is not None and options.grpc_port is None:
        in_file["grpc_port"] = config.grpc_port
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    asked = {name for name, value in values.items() if value is not None}
    asked |= settings_of_environment().keys()
    values |= {"config": path, "host": config.http.host, "port": config.http.port}
    values |= {"grpc_port": config.grpc_port, **config.settings.model_dump(mode="json")}
    decides = next((n for names in (asked, in_file) for n in SETS if n in names), SETS[0])
    rows = {}
    for name, value in values.items():
        by = name
        if name == "model_set" and config.settings.traffic:
            by = "traffic"  # the version with the largest share replaces the asked one
        elif name in SETS and (value is not None or name in {*asked, *in_file}):
            by = decides  # each replaces the other
        source = str(path) if by in in_file else "default"
        if by in asked:
            source = f"--{by.replace('_', '-')}" if by in flags else variable_of(by)
        shown = PASSWORD.sub("//***@", str(value)) if isinstance(value, str | Path) else value
        rows[name] = {"value": shown, "source": source}
    return rows


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
    names = (*Settings.model_fields, *(field.name for field in fields(ServeOptions)))
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
