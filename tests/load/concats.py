"""What chaining DenseNet169's concatenations saves: ``python tests/load/concats.py`` (needs torch).

Makes the INT8 network twice, concatenations as torchvision has them and chained, then loads
each in processes of its own, in turns. The weights are random: structure alone decides here. Prints
JSON: nodes after compilation, load time, memory of a compilation, ms per image.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import openvino as ov
import psutil
import typer
from machine import describe
from result_file import write_result

VARIANTS = ("as torchvision has them", "chained")
BATCH_SIZES = (1, 8)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    input_size: Annotated[int, typer.Option(help="pixels")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
    load: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure both variants in turns."""
    if load:
        typer.echo(json.dumps(_load(load, input_size)))
        return
    with TemporaryDirectory() as folder:
        networks = {
            v: _make(v, Path(folder) / f"{i}.xml", input_size) for i, v in enumerate(VARIANTS)
        }
        rows: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
        for _ in range(rounds):
            for variant, path in networks.items():
                command = [sys.executable, __file__, "--load", str(path)]
                command += ["--input-size", str(input_size)]
                rows[variant].append(json.loads(subprocess.check_output(command)))
    medians = {v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in rows.items()}
    result = {**describe(), "input_size": input_size, "rounds": rows, "median": medians}
    write_result(result, json_file)


def _make(variant: str, path: Path, input_size: int) -> Path:
    import torch

    from calibration.quantization.quantize import quantize
    from calibration.sets.fold import fold, with_softmax
    from calibration.sets.networks import build_network
    from calibration.sets.rewrite import chain_concats
    from models.manifest import QuantizationOptions

    torch.manual_seed(1)
    module = build_network("densenet169", 10).eval()
    shape = [-1, 3, input_size, input_size]
    example = torch.zeros(1, 3, input_size, input_size)
    model = ov.convert_model(module, example_input=example, input=shape)
    if variant == "chained":
        chain_concats(model)
    rng = np.random.default_rng(1)
    images = list(rng.integers(0, 256, (32, input_size, input_size, 3), np.uint8))
    quantized = quantize(fold(with_softmax(model), input_size), images, QuantizationOptions())
    ov.save_model(quantized, path, compress_to_fp16=False)
    return path


def _load(path: Path, input_size: int) -> dict[str, float]:
    from models.runtime import CompiledNetwork, RuntimeOptions

    process = psutil.Process()
    before, started = process.memory_full_info().pss, time.perf_counter()
    network = CompiledNetwork(path, RuntimeOptions(batch_sizes=BATCH_SIZES))
    network.warm_up()
    row = {
        "load_s": round(time.perf_counter() - started, 2),
        "pss_mb": round((process.memory_full_info().pss - before) / 1e6, 1),
        "nodes": _count_nodes(path, input_size),
    }
    for size in BATCH_SIZES:
        batch = np.zeros((size, input_size, input_size, 3), np.uint8)
        times = []
        for _ in range(30):
            begun = time.perf_counter()
            network.infer(batch)
            times.append(time.perf_counter() - begun)
        row[f"ms_per_image_batch_{size}"] = round(statistics.median(times) * 1e3 / size, 2)
    return row


def _count_nodes(path: Path, input_size: int) -> int:
    core = ov.Core()
    model = core.read_model(path)
    model.reshape([1, input_size, input_size, 3])
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return len(compiled.get_runtime_model().get_ops())


if __name__ == "__main__":
    typer.run(main)
