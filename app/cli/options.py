"""Options that more than one command takes."""

from pathlib import Path
from typing import Annotated

import typer

PhotoFolder = Annotated[
    Path | None, typer.Option(help="folder of photos like yours  (default: drawn ones)")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="write the result as JSON; - is stdout")
]
CallersKeyFile = Annotated[
    Path | None,
    typer.Option(help="holds the service's key, if it wants one  (default: TANDEM_API_KEY)"),
]
Roots = Annotated[
    Path | None,
    typer.Option(
        "--ca", help="root certificates for https://  (default: SSL_CERT_FILE, or the system's)"
    ),
]
ClientCert = Annotated[
    Path | None, typer.Option(help="certificate to show a service that asks for one, in PEM")
]
ClientKey = Annotated[
    Path | None, typer.Option(help="its key  (default: in the certificate's own file)")
]
Plot = Annotated[Path | None, typer.Option(help="latency and throughput as a plot, .png or .svg")]
