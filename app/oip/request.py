"""An inference request of the Open Inference Protocol, independent of its transport."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.errors import BadTensorError
from app.oip.tensors import RegionSlice, Tensor, shown

MICROSECONDS = 1e6
# Triton's priorities begin at 1, the most urgent; RFC 9218's urgencies go from 0 to 7.
MAX_URGENCY = 7
MAX_ID = 1024  # characters
REGION, REGION_SIZE, REGION_OFFSET = (
    f"shared_memory_{part}" for part in ("region", "byte_size", "offset")
)


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A requested output; with ``num_classes`` above 0 as Triton's classification strings."""

    name: str
    is_binary: bool = False
    num_classes: int = 0
    region: RegionSlice | None = None  # the region that it is written to, in place of the answer


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Inputs, requested outputs (none: all outputs) and parameters."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    @property
    def top_k(self) -> int | None:
        """The number of labels per image; None: one label, without a dimension for labels."""
        return whole_number(self.parameters, "top_k")

    @property
    def threshold(self) -> float | None:
        """The lowest score of a label in a multi-label set; None: the set's own."""
        value: float | None = _number(self.parameters, "threshold", int | float, "a number")
        return value

    @property
    def timeout_s(self) -> float | None:
        """The client's time limit; the parameter is in microseconds, as in Triton."""
        timeout_us = whole_number(self.parameters, "timeout")
        if timeout_us is not None and timeout_us < 0:
            raise BadTensorError(f"timeout is {timeout_us}; give microseconds above 0")
        return timeout_us / MICROSECONDS if timeout_us else None

    @property
    def priority(self) -> str | None:
        """The value of a Priority header (RFC 9218); None if the client gives no priority."""
        priority = whole_number(self.parameters, "priority")
        if priority is not None and priority < 0:
            raise BadTensorError(
                f"priority is {priority}; 1 goes first, 5 and above wait for others"
            )
        return f"u={min(priority - 1, MAX_URGENCY)}" if priority else None

    @property
    def uses_regions(self) -> bool:
        """Whether an input or output is in shared memory."""
        return any(i.region for i in self.inputs) or any(o.region for o in self.outputs)

    @property
    def wants_binary(self) -> bool:
        """Whether outputs are binary by default: Triton's ``binary_data_output``."""
        return truth(self.parameters, "binary_data_output")


def whole_number(parameters: Mapping[str, Any], name: str) -> int | None:
    """Return an integer parameter; None if it is absent."""
    value: int | None = _number(parameters, name, int, "a whole number")
    return value


def _number(parameters: Mapping[str, Any], name: str, kind: Any, what: str) -> Any:
    value = parameters.get(name)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise BadTensorError(f"parameter {name} is {shown(value)}; it is {what}")


def truth(parameters: Mapping[str, Any], name: str) -> bool:
    """Return a boolean parameter; False if it is absent."""
    value = parameters.get(name, False)
    if isinstance(value, bool):
        return value
    raise BadTensorError(f"parameter {name} is {shown(value)}; it is true or false")


def has_base64(parameters: Mapping[str, Any]) -> bool:
    """Whether a BYTES tensor's elements are base64, by MLServer's ``content_type``."""
    return parameters.get("content_type") == "base64"


def requested_output(
    name: object, parameters: Mapping[str, Any], *, is_binary: bool = False
) -> RequestedOutput:
    """Return a requested output; ``is_binary`` is the default if its parameters do not say.

    Raises:
        BadTensorError: the name or a parameter has the wrong type.

    """
    if not isinstance(name, str):
        raise BadTensorError(f"an output's name is {shown(name)}; it is a text")
    region = region_slice(f"output {shown(name)}", parameters)
    num_classes = whole_number(parameters, "classification")
    if num_classes is not None and num_classes < 1:
        raise BadTensorError(
            f"output {shown(name)}: classification is {num_classes}; ask for 1 class or more"
        )
    if "binary_data" in parameters:
        is_binary = truth(parameters, "binary_data")
    return RequestedOutput(name, is_binary, num_classes or 0, region)


def checked_id(value: object) -> str:
    """Return the request's id, checked."""
    if not isinstance(value, str) or len(value) > MAX_ID:
        raise BadTensorError(f"id is {shown(value)}; it is a text of up to {MAX_ID} characters")
    return value


def region_slice(where: str, parameters: Mapping[str, Any]) -> RegionSlice | None:
    """Return the region slice that a tensor's parameters name; None if they name none.

    Raises:
        BadTensorError: the parameters are incomplete, or their offset or size is impossible.

    """
    name, size = parameters.get(REGION), whole_number(parameters, REGION_SIZE)
    offset = whole_number(parameters, REGION_OFFSET)
    if name is None and size is None and offset is None:
        return None
    if not isinstance(name, str) or not name:
        raise BadTensorError(
            f"{where}: {REGION} is {shown(name)}; it is a registered region's name"
        )
    if size is None or size < 1 or (offset or 0) < 0:
        raise BadTensorError(
            f"{where}: {REGION_SIZE} is {shown(size)} and {REGION_OFFSET} {shown(offset or 0)}; "
            "give a size from 1, and an offset from 0 or none"
        )
    return RegionSlice(name, size, offset or 0)
