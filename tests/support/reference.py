"""Writes docs/reference from the code: make reference.

Settings, autoscaling, metrics, the command line, errors, the HTTP interface and gRPC's, and what
protects a service. A test compares the pages with what this writes.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Sequence
from enum import Enum
from operator import itemgetter
from pathlib import Path
from typing import Any, get_type_hints

from pydantic.fields import FieldInfo

from app.access import Keys
from app.errors import HeavyFileError
from app.serve.scaling import ScalingOptions
from app.settings import Settings
from app.telemetry.metric_table import METRICS
from models.errors import ImageError, TandemError
from tests.support.command_line import all_commands
from tests.support.haproxy_configs import haproxys_errors
from tests.support.protections import tables_of_protections
from tests.support.wrapped import wrapped

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- Written by make reference. Change the code, not this page. -->\n"
# Roots of the tree, and an error that only stages send to the Gateway.
NOT_LISTED = (TandemError, ImageError, HeavyFileError)
PER_USER = {"compile_cache": "in the user's cache folder"}


def main() -> None:
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")


def pages() -> dict[str, str]:
    """Return the text of each page by its file's name."""
    writers: dict[str, Callable[[], str]] = {
        "settings.md": settings_page,
        "scaling.md": scaling_page,
        "metrics.md": metrics_page,
        "command-line.md": command_line_page,
        "errors.md": errors_page,
        "http.md": http_page,
        "grpc.md": grpc_page,
        "protections.md": protections_page,
    }
    return {name: wrapped(MADE + write().rstrip() + "\n") for name, write in writers.items()}


def settings_page() -> str:
    rows = [
        (f"`{name}`", f"`{_type(field)}`", _default(name, field), str(field.description))
        for name, field in Settings.model_fields.items()
    ]
    return (
        "# Settings\n\n"
        "Write these under `args` in a configuration file. `tandem serve` reads each from a\n"
        "variable too: `TANDEM_` and the name in capitals. `tandem serve --print-config` shows\n"
        "the values and where each came from.\n\n"
        + _table(("setting", "type", "default", "description"), rows)
    )


def scaling_page() -> str:
    rows = [
        (f"`{name}`", f"`{_type(field)}`", _default(name, field), str(field.description))
        for name, field in ScalingOptions.model_fields.items()
    ]
    return (
        "# Autoscaling policy\n\n"
        "Write these as `policy_kwargs` of `autoscaling_policy` in a configuration file.\n"
        "`configs/cluster.yaml` has an example.\n\n"
        + _table(("option", "type", "default", "description"), rows)
    )


def metrics_page() -> str:
    rows = [
        (
            f"`ray_{metric.name}{'_total' if metric.kind == 'counter' else ''}`",
            metric.kind,
            ", ".join(f"`{tag}`" for tag in metric.tags) or "none",
            metric.text + (f" (only when {metric.when})" if metric.when else ""),
        )
        for metric in METRICS
    ]
    return (
        "# Metrics\n\n"
        "`tandem serve` prints the address. A histogram has three series: `_bucket`, `_sum`,\n"
        "`_count`. Ray adds the tags of the deployment, the replica and the node.\n\n"
        + _table(("metric", "kind", "tags", "description"), rows)
    )


def command_line_page() -> str:
    parts = [
        "# Command line\n\n"
        "Errors go to stderr, and the exit code is 2. An error is one line; wrong usage comes\n"
        "with the usage. `tandem serve` logs JSON where it does not write to a terminal.\n\n"
        "`--json` prints JSON to stdout in place of text, in every command that has it. Where its\n"
        "value is a path it also takes a file, `--json FILE`, and `-` is stdout.\n"
    ]
    for path, command in sorted(all_commands(), key=itemgetter(0)):
        if hasattr(command, "commands"):  # a group
            continue
        types = get_type_hints(inspect.unwrap(command.callback))
        text = re.split(r"\f|\n *Args:", command.help or "")[0]
        parts.append(f"## tandem {' '.join(path)}\n\n{_plain(text)}\n")
        rows = [
            (
                _names(parameter),
                _choices(parameter, types),
                _plain(getattr(parameter, "help", "") or ""),
            )
            for parameter in command.params
            if not getattr(parameter, "hidden", False)
        ]
        if rows:
            parts.append(_table(("argument or option", "value", "description"), rows))
    return "\n".join(parts)


def errors_page() -> str:
    """Return every error that a caller can get, by status."""
    ours = {(e.status, e.code, _plain((e.__doc__ or "").split("\n\n")[0])) for e in _errors()}
    of_haproxy = {(*which, f"HAProxy: {text}.") for which, text in haproxys_errors().items()}
    rows = [(str(status), f"`{code}`", when) for status, code, when in sorted(ours | of_haproxy)]
    return (
        "# Errors\n\n"
        'An error is JSON: `{"error": {"code", "message", "request_id"}}`. The message names\n'
        "the value, the limit and what to do next. Below `/v2` and `/v1/models/` the error is\n"
        'the message alone, as in KServe\'s protocols: `{"error": "..."}`. HAProxy answers some\n'
        "errors itself, with an empty `request_id`; its 400 and `slow_request` have the first\n"
        "form everywhere.\n\n"
        "Status 500 marks errors of a configuration or of the operator's functions; commands\n"
        "print those. The code `internal` is a fault of Tandem's: please report it.\n\n"
        + _table(("status", "code", "when"), rows)
    )


def http_page() -> str:
    """Return every route of the HTTP interface, as a service with keys describes it."""
    from app.http.api import create_api
    from tests.support.fakes import FakeService

    service = FakeService()
    service.keys = Keys(["KEY" * 8])
    paths: dict[str, dict[str, Any]] = create_api(service).openapi()["paths"]
    rows = [
        (
            f"`{method.upper()} {path}`",
            _plain(call.get("summary", "")),
            (", ".join(f"`{p['name']}` ({p['in']})" for p in call.get("parameters", [])) or "none"),
            ", ".join(sorted(call.get("responses", {}))),
        )
        for path, methods in sorted(paths.items())
        for method, call in methods.items()
    ]
    return (
        "# HTTP\n\n"
        "A running service shows this at `/docs`, and as OpenAPI at `/openapi.json`. Only a\n"
        "service with keys answers 401.\n\n"
        + _table(("request", "does", "parameters", "answers"), rows)
    )


def grpc_page() -> str:
    proto = (ROOT / "app/grpc/tandem.proto").read_text("utf-8").strip()
    return (
        "# gRPC\n\n"
        "`tandem serve --grpc-port 9000` opens the port. It answers `tandem.v1.Ensemble`, below,\n"
        "the Open Inference Protocol's `inference.GRPCInferenceService`\n"
        "(`app/grpc/open_inference.proto`), and of TensorFlow Serving what\n"
        "`app/grpc/tensorflow_serving.proto` has. It has server reflection and the health\n"
        "protocol.\n\n"
        f"```proto\n{proto}\n```\n"
    )


def protections_page() -> str:
    values, rules, outside = (_table(head, rows) for head, *rows in tables_of_protections())
    return (
        "# What protects a service\n\n"
        "Read from the configurations, the environment that `tandem` asks for, Serve's defaults\n"
        "and HAProxy's rules. `-` is a protection that is not there. `serve run` without\n"
        "`tandem environment` has no HAProxy, and none of its protections. A pod of\n"
        f"`configs/kubernetes/base` runs `tandem serve`.\n\n{values}\n"
        f"## Rules of HAProxy\n\n{rules}\n## Started again from outside\n\n{outside}"
    )


def _type(field: FieldInfo) -> str:
    return _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    for prefix in ("typing.", "pathlib._local.", "pathlib.", "models.record."):
        text = text.replace(prefix, "")
    text = re.sub(r"Annotated\[(\w+),.*?\](?=[,\]]|$)", r"\1", text).replace("NoneType", "None")
    # Before Python 3.14 a union of typing's own forms is printed as Optional.
    text = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", text)
    return re.sub(r"Literal\[([^]]*)\]", _words, text)


def _words(literal: re.Match[str]) -> str:
    return " | ".join(word.strip("'\"") for word in literal[1].split(", "))


def _default(name: str, field: FieldInfo) -> str:
    if name in PER_USER:
        return PER_USER[name]
    value = field.get_default(call_default_factory=True)
    return f"`{json.dumps(value, default=str)}`"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _choices(parameter: Any, types: dict[str, Any]) -> str:
    if getattr(parameter, "is_flag", False):
        return "flag"
    kind = types[parameter.name]
    words = "|".join(kind) if _is_enum(kind) else _type_name(kind)
    bounds = _bounds(parameter.min, parameter.max)
    default = parameter.default
    is_shown = parameter.show_default and not (
        default is None or callable(default) or default in ((), [])
    )
    shown = f"; default `{_value(default)}`" if is_shown else ""
    return f"`{words}`{bounds}{shown}{'; required' if parameter.required else ''}"


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _bounds(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f", {least} to {most}"
    return f", at least {least}" if least is not None else ""


def _value(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _errors(base: type[TandemError] = TandemError) -> set[type[TandemError]]:
    """Return the errors of the service and of model sets, without those of other programs."""
    is_ours = base.__module__ in ("app.errors", "models.errors") and base not in NOT_LISTED
    ours = {base} if is_ours else set()
    return ours.union(*(_errors(error) for error in base.__subclasses__()))


def _plain(text: str) -> str:
    """Return one line, without the markup of docstrings and of the terminal."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split()))
    return re.sub(r"\[/?(?:bold|dim|cyan|red)?\]", "", text).replace("``", "`")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "200")
    main()
