"""Which protocol, payload and load: ``python tests/load/protocols.py PHOTOS``.

One service, as shipped but for ``shared_memory``, is loaded by every way of getting images to it,
in turns: 1 to 64 clients, 1 to 64 images in a request, connections that are kept or new each time,
and Poisson arrivals at shares of its capacity. (What serving adds to the networks: overhead.py.)
Formats of a tensor are measured by themselves (pip install 'tandem-serve[study]'). Prints JSON;
``--document`` writes docs/protocols.md and its plots, from new figures or from a file of them
(``--from``).
"""

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
import yaml
from machine import ROOT, describe
from protocol_study.document import write_document
from protocol_study.generator import generating
from protocol_study.payloads import NUM_PHOTOS, Payloads
from protocol_study.turns import SECTIONS, Study, cases, ways
from protocol_study.usage import Service
from protocol_study.ways import Address, SendError, Way
from protocol_study.wire import wire_bytes
from result_file import write_result
from running import running_service

from app.bench.load import photos_in
from app.launch.checks import free_port
from models.image import read_image
from models.model_set import load_model_set

WIRE_BATCHES = (1, 16)
DECODED_TIMES = 5


def main(
    photos: Annotated[Path | None, typer.Argument(help="folder of JPEGs", exists=True)] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="of each turn", min=0.5)] = 2.5,
    only: Annotated[str, typer.Option(help="sections, with commas")] = ",".join(SECTIONS),
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
    document: Annotated[Path | None, typer.Option(help="write Markdown and plots there")] = None,
    given: Annotated[Path | None, typer.Option("--from", help="figures measured before")] = None,
) -> None:
    """Measure, or take figures measured before, and write the document."""
    if (photos is None) == (given is None):
        raise SystemExit("give a folder of photos to measure with, or --from FILE: one of the two")
    if unknown := set(only.split(",")) - set(SECTIONS):
        raise SystemExit(f"--only {','.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    if photos is not None:
        result = measure(photos_in(photos)[:NUM_PHOTOS], rounds, seconds, only.split(","))
        write_result(result, out)
    else:
        assert given is not None
        result = json.loads(given.read_text("utf-8"))
    if document is not None:
        write_document(result, document)


def measure(files: list[bytes], rounds: int, seconds: float, sections: list[str]) -> dict[str, Any]:
    """Return all figures."""
    from protocol_study import serialisers  # its formats need more than a document does

    model_set = load_model_set("imagenette")
    payloads = Payloads(files, model_set.manifest.image, model_set.manifest.num_classes)
    port = free_port()
    facts = describe()
    with TemporaryDirectory() as folder:
        config = config_with_shared_memory(Path(folder))
        with running_service("--config", str(config), "--grpc-port", str(port)) as service:
            address = Address(service.url, f"127.0.0.1:{port}", model_set.name)
            watched = Service(service.process.pid)
            with generating(address, payloads) as generator:
                study = Study(generator, watched, seconds)
                capacity = study.capacity()
                rows = study.rounds(rounds, cases(sections), capacity)
            wire = wire_rows(address, payloads)
    return {
        "machine": facts,
        "photos": {"number": len(files), "mean_bytes": round(sum(map(len, files)) / len(files))},
        "input_size": model_set.manifest.image.input_size,
        "rounds": rounds,
        "seconds": seconds,
        "capacity": capacity,
        "decode_cpu_ms": decode_cpu_ms(payloads),
        "rows": rows,
        "wire": wire,
        "serialisers": serialisers.measure(),
    }


def config_with_shared_memory(folder: Path) -> Path:
    """Write serve_config.yaml with ``shared_memory``, and return its path."""
    content = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
    content["applications"][0].setdefault("args", {})["shared_memory"] = "unproxied"
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(content), "utf-8")
    return path


def wire_rows(address: Address, payloads: Payloads) -> list[dict[str, Any]]:
    """Return the bytes of an image on the wire, by each way."""
    rows = []
    for way in ways():
        for batch in WIRE_BATCHES:
            one = Way(way.protocol, way.payload, batch)
            row: dict[str, Any] = {"protocol": way.protocol, "payload": way.payload, "batch": batch}
            if batch > 1 and way.protocol == "HTTP raw":
                continue
            try:
                rows.append(row | wire_bytes(one, address, payloads))
            except SendError as error:
                rows.append(row | {"refused": f"{error.kind}: {error}"})
    return rows


def decode_cpu_ms(payloads: Payloads) -> float:
    """Return what decoding a photo costs, which who sends pixels has done already."""
    before = time.thread_time()
    for _ in range(DECODED_TIMES):
        for file in payloads.files:
            read_image(file, payloads.image.rule)
    spent = time.thread_time() - before
    return round(spent * 1e3 / (DECODED_TIMES * len(payloads.files)), 3)


if __name__ == "__main__":
    typer.run(main)
