"""Options that more than one command takes, their checks, and options as a dataclass."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from app.errors import ConfigError
from models.files import check_can_write
from models.machine import needs_extra

if TYPE_CHECKING:
    from app.access import ClientTls

PLOTS = (".png", ".svg")

PhotoFolder = Annotated[
    Path | None, typer.Option(help="folder of photos like yours  (default: generated ones)")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="print JSON, or write it to this file")
]
Plot = Annotated[Path | None, typer.Option(help="file for a plot, .png or .svg")]


@dataclass(frozen=True)
class Caller:
    """The key and the certificates with which a command calls a service."""

    key_file: Annotated[
        Path | None, typer.Option(help="file with the service's API key  (default: TANDEM_API_KEY)")
    ] = None
    ca: Annotated[
        Path | None,
        typer.Option(
            help="root certificates for https://  (default: SSL_CERT_FILE, or the system's)"
        ),
    ] = None
    client_cert: Annotated[
        Path | None, typer.Option(help="client certificate in PEM, for a service that requires one")
    ] = None
    client_key: Annotated[
        Path | None, typer.Option(help="private key of --client-cert  (default: in the same file)")
    ] = None

    @property
    def tls(self) -> "ClientTls":
        """The files of TLS."""
        from app.access import ClientTls

        return ClientTls(self.ca, self.client_cert, self.client_key)


def service_url(text: str) -> str:
    """Return the address of a service without a slash at its end.

    Raises :class:`ConfigError` if it is not an ``http://`` or ``https://`` URL.
    """
    from tandem_client.exchange import checked_url

    try:
        return checked_url(text)
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from error


def check_can_plot(path: Path | None, command: str) -> None:
    """Check that ``command --plot`` can draw into ``path``, before minutes of measuring.

    Raises:
        ResultFileError: the file cannot be written.
        ConfigError: it has another suffix than ``PLOTS``.
        MissingExtraError: matplotlib is not installed.
    """
    check_can_write(path)
    if path is None:
        return
    if path.suffix.lower() not in PLOTS:
        raise ConfigError(f"--plot {path}: a name that ends with {' or '.join(PLOTS)}")
    with needs_extra("calibrate", f"{command} --plot"):
        import matplotlib  # noqa: F401


def one_parameter_a_field(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as Typer reads it: each dataclass that it takes becomes its fields.

    So an option is written once: as a field with its type, its ``typer.Option`` and its default.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = dict[str, inspect.Parameter]()
    fields = dict[str, dict[str, inspect.Parameter]]()
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            fields[name] = dict(inspect.signature(hints[name]).parameters)
            parameters |= fields[name]
        else:
            parameters[name] = parameter

    def typed(**values: Any) -> None:
        for name, own in fields.items():
            values[name] = hints[name](**{field: values.pop(field) for field in own})
        command(**values)

    by_name = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters.values()]
    typed.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    typed.__annotations__ = {each.name: each.annotation for each in by_name}
    typed.__doc__ = command.__doc__
    return typed
