"""What the golden check lets pass, and what it finds: ``python tests/load/golden_faults.py``.

Every row is one way in which a network may answer otherwise, harmless or not: the mean difference
of the kept probabilities, its share of them, and the share of images whose class changed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import openvino as ov
import typer
from machine import describe
from openvino import opset13 as ops

from models import golden
from models.golden_record import NUM_IMAGES, GoldenAnswer
from models.model_set import load_model_set
from models.runtime import CompiledNetwork, RuntimeOptions, read_network
from tests.support.bf16 import rounded_to_bf16
from tests.support.drawn_networks import DARKER, darker, enlarged, swapped

OPTIONS = RuntimeOptions(batch_sizes=(8,))
OLDER_KERNELS = "SSE41"  # for OpenVINO's ONEDNN_MAX_CPU_ISA


def main(
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
    answers_of: Annotated[str | None, typer.Option(hidden=True)] = None,
    model_sets: Annotated[list[str] | None, typer.Option("--model-set")] = None,
) -> None:
    """Print the result as JSON."""
    if answers_of is not None:  # this process was started with other kernels
        typer.echo(json.dumps(_answers(_network(*answers_of.split("::"))).tolist()))
        return
    result = {
        "machine": describe(),
        "limits": {
            "tolerance": golden.TOLERANCE,
            "other_cpu_tolerance": golden.OTHER_CPU_TOLERANCE,
            "sure_margin": golden.SURE_MARGIN,
        },
        "sets": {
            load_model_set(name).name: {
                member.name: _rows(name, member.name)
                for member in load_model_set(name).manifest.members
            }
            for name in model_sets or ["imagenette"]
        },
    }
    text = json.dumps(result, indent=2)
    typer.echo(text)
    if out is not None:
        out.write_text(text + "\n", "utf-8")


def _network(model_set: str, member: str) -> CompiledNetwork:
    return CompiledNetwork(load_model_set(model_set).network_path(member), OPTIONS)


def _answers(
    network: CompiledNetwork, change: Callable[[np.ndarray], np.ndarray] = lambda images: images
) -> np.ndarray:
    images = change(golden.golden_images(network.input_shape[0]))
    return np.concatenate([network.infer(images[i : i + 8]) for i in range(0, NUM_IMAGES, 8)])


def _rows(name: str, member: str) -> dict[str, Any]:
    model_set = load_model_set(name)
    path = model_set.network_path(member)
    network = _network(name, member)
    expected = golden.answer_of(network)
    in_bf16 = rounded_to_bf16(read_network(path))
    images = golden.golden_images(network.input_shape[0])
    noise = np.random.default_rng(0).integers(-4, 5, images.shape)
    answers = {
        f"{OLDER_KERNELS} kernels": _with_older_kernels(name, member),
        "pixels off by up to 4 levels": _answers(
            network, lambda images: np.clip(images + noise, 0, 255).astype(np.uint8)
        ),
        "every layer rounded to bf16": _answers(CompiledNetwork(in_bf16, OPTIONS)),
        "half of one layer's channels zero": _answers(CompiledNetwork(_maimed(path), OPTIONS)),
        "colours swapped": _answers(network, swapped),
        f"{DARKER} levels darker": _answers(network, darker),
        "the middle 7/8 enlarged": _answers(network, enlarged),
    }
    if "FP16" in model_set.manifest.member(member).networks:
        as_float = CompiledNetwork(model_set.network_path(member, "FP16"), OPTIONS)
        answers["float against INT8"] = _answers(as_float)
    return {what: _row(expected, rows) for what, rows in answers.items()}


def _row(expected: GoldenAnswer, found: np.ndarray) -> dict[str, Any]:
    indices = np.array([[index for index, _ in row] for row in expected.rows])
    before = np.array([[p for _, p in row] for row in expected.rows])
    off = np.abs(np.take_along_axis(found, indices, axis=1) - before)
    changed = found.argmax(axis=1) != indices[:, 0]
    return {
        "mean": round(float(off.mean()), 4),
        "share": round(float(off.sum() / before.sum()), 4),
        "changed": round(float(changed.mean()), 3),
        "is_refused": golden.compare(expected, found) is not None,
        "is_refused_elsewhere": golden.compare(expected, found, golden.OTHER_CPU_TOLERANCE)
        is not None,
    }


def _with_older_kernels(model_set: str, member: str) -> np.ndarray:
    done = subprocess.run(
        [sys.executable, __file__, "--answers-of", f"{model_set}::{member}"],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": OLDER_KERNELS},
        capture_output=True,
        check=True,
    )
    return np.array(json.loads(done.stdout))


def _maimed(path: Path) -> ov.Model:
    """Set the first half of the channels of the middle convolution to zero."""
    model = read_network(path)
    kernels = [
        node
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Constant"
        and node.get_element_type() == ov.Type.i8
        and len(node.get_output_shape(0)) == 4
    ]
    chosen = kernels[len(kernels) // 2]
    values = np.array(chosen.data)
    values[: len(values) // 2] = 0
    maimed = ops.constant(values)
    for port in chosen.output(0).get_target_inputs():
        port.replace_source_output(maimed.output(0))
    return model


if __name__ == "__main__":
    typer.run(main)
