"""The ladder's rungs in their order, each with its changes to how a network is run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calibration.ladder.rung import Engine, RungOptions

SERVICE = "service"  # the rung that runs ``tandem serve``
BATCHES = (4, 8, 16)


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: its engine, and the changes that it tries.

    A rung builds on the fastest earlier rung of the same engine, and changes its options. Of
    several changes it measures the one with the highest throughput in a short run.
    """

    name: str
    title: str
    engine: Engine | None  # None: the service
    changes: tuple[Mapping[str, Any], ...] = field(default=({},))
    needs: tuple[Engine, ...] = ()  # preparations, each made once

    def choices(self, base: RungOptions) -> tuple[RungOptions, ...]:
        """Return the options to try, without repetitions."""
        changed = (base.model_copy(update=dict(change)) for change in self.changes)
        return tuple(dict.fromkeys(changed))


def rungs(cores: int, cascade_margin: float) -> tuple[Rung, ...]:
    """Return every rung of a ladder on ``cores`` cores."""
    return (*_torch_rungs(cores), *_openvino_rungs(cores), *_set_rungs(cascade_margin))


def _torch_rungs(cores: int) -> tuple[Rung, ...]:
    divisions = sorted({1, max(1, cores // 2), cores})
    threads = _each("threads", "callers", values=[(n, cores // n) for n in divisions])
    scripted, compiled = ({"mode": mode} for mode in ("script", "compile"))
    return (
        Rung("eager", "PyTorch, eager, one by one", "torch"),
        Rung("inference_mode", "inference mode", "torch", ({"is_inference_mode": True},)),
        Rung("batches", "batches", "torch", _each("batch", values=[(n,) for n in BATCHES])),
        Rung("threads", "threads", "torch", threads),
        Rung("channels_last", "channels last", "torch", ({"is_channels_last": True},)),
        Rung("torchscript", "TorchScript, frozen", "torch", (scripted,)),
        Rung("compile", "torch.compile", "torch", (compiled,)),
        Rung("torch_bf16", "PyTorch, bfloat16", "torch", ({"float_type": "bf16"},)),
        Rung(
            "onnxruntime",
            "ONNX Runtime",
            "onnxruntime",
            _each("batch", values=[(n,) for n in (1, 8)]),
            ("export",),
        ),
    )


def _openvino_rungs(cores: int) -> tuple[Rung, ...]:
    batches = _each("batch", values=[(n,) for n in (1, 8)])
    streams = _each("streams", values=[(n,) for n in sorted({1, cores, 2 * cores})])
    low = _each("float_type", values=[("bf16",), ("f16",)])
    int8 = {"precision": "INT8"}
    # The service's options, since without a float network no earlier rung has found any.
    served = {**int8, "float_type": "f32", "is_static": True, "streams": cores}
    quantised = (
        *({**int8, **change} for change in ({}, {"float_type": "f32"}, *batches)),
        *({**served, **size} for size in batches),
    )
    return (
        Rung("openvino", "OpenVINO, float", "openvino", batches),
        Rung("latency", "latency hint", "openvino", ({"hint": "latency", "batch": 1},)),
        Rung(
            "throughput",
            "throughput hint",
            "openvino",
            tuple({**size, "hint": "throughput"} for size in batches),
        ),
        Rung("fixed_shapes", "fixed shapes", "openvino", ({"is_static": True},)),
        Rung("streams", "streams", "openvino", streams),
        Rung("low_precision", "bfloat16 or float16", "openvino", low),
        Rung("int8", "INT8 by NNCF", "openvino", quantised, ("quantize",)),
    )


def _set_rungs(cascade_margin: float) -> tuple[Rung, ...]:
    whole = {"batch": 8, "precision": "INT8"}
    cascade = {**whole, "cascade_margin": cascade_margin}
    return (
        Rung("ensemble", "all members, INT8", "ensemble", (whole,)),
        Rung("cascade", "with the cascade", "ensemble", (cascade,)),
        Rung(SERVICE, "the service, over HTTP", None),
    )


def _each(*names: str, values: Sequence[tuple[Any, ...]]) -> tuple[dict[str, Any], ...]:
    return tuple(dict(zip(names, row, strict=True)) for row in values)
