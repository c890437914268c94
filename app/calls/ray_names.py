"""Looks up private names of Ray, grouped by the feature that uses them.

A :class:`Feature` is left out with a warning if one of its names does not fit; then Ray's default
applies. A feature is required only if it protects the service, or if nothing could be deployed
without it. :mod:`app.calls.ray_features` lists the replicas' features,
:mod:`app.launch.ray_internals` those of ``tandem serve``. No module of ``app`` imports a private
name before its feature fits.
"""

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class RayName:
    """A private name: its module, and the parts of it that are used.

    Attributes:
        module: the module that defines it.
        name: dotted, below the module.
        parameters: the parameters that are passed.
        attributes: for a class, attributes that its ``__init__`` sets.
        entries: for a list of pairs, the first halves that must be there.

    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """Return how the installed name differs from its use; None if it fits."""
        place = f"{self.module}.{self.name}"
        try:
            value = _resolved(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError):
            return f"{place} is not there"
        for verb, wanted, there in (
            ("takes", self.parameters, _parameters),
            ("has", self.attributes, _set_in_init),
            ("lists", self.entries, _entries),
        ):
            if wanted and (lacking := set(wanted) - there(value)):
                return f"{place} {verb} no {', '.join(sorted(lacking))}"
        return None


@dataclass(frozen=True)
class Feature:
    """Private names that are used together.

    Attributes:
        name: the feature's name in warnings.
        without: a sentence on how the service runs without it.
        names: all of these must fit.
        is_required: whether the service refuses to start without it.

    """

    name: str
    without: str
    names: tuple[RayName, ...]
    is_required: bool = False

    def problem(self) -> str | None:
        problems = [problem for name in self.names if (problem := name.problem())]
        return "; ".join(problems) or None

    def fits(self) -> bool:
        return self.problem() is None


def _resolved(owner: object, dotted: str) -> object:
    for part in dotted.split("."):
        is_field = part in _fields(owner)
        owner = None if is_field else getattr(owner, part)
    return owner


def _fields(owner: object) -> Iterable[str]:
    """Return the fields of a dataclass or pydantic model, which are no attributes of its class."""
    declared = getattr(owner, "__dataclass_fields__", None) or getattr(owner, "model_fields", {})
    return declared if isinstance(declared, dict) else ()


def _parameters(value: object) -> set[str]:
    return set(inspect.signature(value).parameters) if callable(value) else set()


def _set_in_init(value: object) -> set[str]:
    return {
        name
        for parent in getattr(value, "__mro__", ())
        if inspect.isfunction(init := vars(parent).get("__init__"))
        for name in init.__code__.co_names
    }


def _entries(value: object) -> set[str]:
    return {name for name, _ in value} if isinstance(value, list) else set()
