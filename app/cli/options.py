"""Options that more than one command takes."""

from pathlib import Path
from typing import Annotated

import typer

Images = Annotated[
    Path | None, typer.Option(help="folder of photos like yours  (default: drawn ones)")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="write the result as JSON; - is stdout")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="holds the service's key, if it wants one  (default: TANDEM_API_KEY)"),
]
Plot = Annotated[Path | None, typer.Option(help="latency and throughput as a plot, .png or .svg")]
