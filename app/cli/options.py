"""Options that more than one command takes, and their checks."""

from pathlib import Path
from typing import Annotated

import typer

from app.errors import ConfigError
from models.files import check_can_write
from models.machine import needs_extra

PLOTS = (".png", ".svg")

PhotoFolder = Annotated[
    Path | None, typer.Option(help="folder of photos like yours  (default: generated ones)")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="file for the result as JSON; - is stdout")
]
CallersKeyFile = Annotated[
    Path | None,
    typer.Option(help="file with the service's API key  (default: TANDEM_API_KEY)"),
]
Roots = Annotated[
    Path | None,
    typer.Option(
        "--ca", help="root certificates for https://  (default: SSL_CERT_FILE, or the system's)"
    ),
]
ClientCert = Annotated[
    Path | None, typer.Option(help="client certificate in PEM, for a service that requires one")
]
ClientKey = Annotated[
    Path | None, typer.Option(help="private key of --client-cert  (default: in the same file)")
]
Plot = Annotated[Path | None, typer.Option(help="file for a plot, .png or .svg")]


def service_url(text: str) -> str:
    """Return the address of a service without a slash at its end.

    Raises:
        ConfigError: it is not an ``http://`` or ``https://`` URL.

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
