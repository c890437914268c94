"""The answer to an inference request, and its form over HTTP: JSON, then the binary tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from app.oip.request import REGION, REGION_OFFSET, REGION_SIZE
from app.oip.tensors import RegionSlice, packed_elements

VERSION = "1"  # of every model


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """FP32 contents are an array in the tensor's shape, BYTES a list of elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    contents: npt.NDArray[np.float32] | Sequence[bytes]
    is_binary: bool = False
    region: RegionSlice | None = None  # where the contents went, in place of the answer

    @property
    def parameters(self) -> dict[str, str | int]:
        """Say where the contents are, if they are in a region."""
        if self.region is None:
            return {}
        told: dict[str, str | int] = {REGION: self.region.region}
        told[REGION_SIZE] = self.region.byte_size
        return told | ({REGION_OFFSET: self.region.offset} if self.region.offset else {})

    def packed(self) -> bytes:
        """Return the contents in their binary form."""
        if isinstance(self.contents, np.ndarray):
            return np.ascontiguousarray(self.contents, "<f4").tobytes()
        return packed_elements(self.contents)

    def values(self) -> list[Any]:
        """Return the contents for JSON: row-major, not nested."""
        if isinstance(self.contents, np.ndarray):
            flat: list[Any] = self.contents.ravel().tolist()
            return flat
        return [element.decode("utf-8", "replace") for element in self.contents]


@dataclass(frozen=True, slots=True)
class InferAnswer:
    """The outputs that were asked for, in that order."""

    model_name: str
    id: str
    outputs: tuple[OutputTensor, ...]
    parameters: dict[str, Any] = field(default_factory=dict)


def rendered(answer: InferAnswer) -> tuple[bytes, int | None]:
    """Return the body, and how many bytes of it are JSON; None if all are."""
    parts: list[bytes] = []
    outputs = [_output(output, parts) for output in answer.outputs]
    told: dict[str, Any] = {"model_name": answer.model_name, "model_version": VERSION}
    if answer.id:
        told["id"] = answer.id
    if answer.parameters:
        told["parameters"] = answer.parameters
    text = orjson.dumps(told | {"outputs": outputs})
    return (b"".join((text, *parts)), len(text)) if parts else (text, None)


def _output(output: OutputTensor, parts: list[bytes]) -> dict[str, Any]:
    """Return an output as JSON; one that is binary adds its contents to ``parts``."""
    told: dict[str, Any] = {
        "name": output.name,
        "datatype": output.datatype,
        "shape": output.shape,
    }
    if output.region is not None:
        return told | {"parameters": output.parameters}
    if not output.is_binary:
        return told | {"data": output.values()}
    parts.append(output.packed())
    return told | {"parameters": {"binary_data_size": len(parts[-1])}}
