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
Plot = Annotated[Path | None, typer.Option(help="latency and throughput as a plot, .png or .svg")]
