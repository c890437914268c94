"""What TorchScript's pickles hold, as data: tensors, numbers, and objects with their state."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Global:
    """A name that the pickle refers to."""

    name: str


@dataclass(frozen=True)
class Storage:
    """Raw bytes of a tensor, somewhere in the archive."""

    kind: str  # torch.FloatStorage
    key: str
    numel: int


@dataclass(frozen=True)
class Tensor:
    """A tensor: a view of a storage, in elements."""

    storage: Storage
    offset: int
    sides: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True, repr=False)
class TypedList:
    """A list of numbers or tensors: int, double, bool or tensor."""

    kind: str
    values: list[Any]


@dataclass(frozen=True, repr=False)
class Tagged:
    """A list or dictionary with its type in words."""

    value: Any
    kind: str


@dataclass(eq=False, repr=False)
class Instance:
    """An object of one of the file's own classes; its state is set once."""

    name: str
    state: dict[str, Any] | None = None


HOLDERS = (Instance, TypedList, Tagged, dict, list, tuple)


def tensors_in(
    value: Any, where: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with the name of its place, as ``conv1.weight``; each object once."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, HOLDERS) and id(value) not in seen:
        seen.add(id(value))
        for name, part in parts_of(value):
            yield from tensors_in(part, f"{where}.{name}" if where else str(name), seen)


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Return what an object, list or dictionary holds, by name or place."""
    if isinstance(value, Instance):
        return list((value.state or {}).items())
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, TypedList):
        return list(enumerate(value.values))
    return [("", value.value)] if isinstance(value, Tagged) else list(enumerate(value))
