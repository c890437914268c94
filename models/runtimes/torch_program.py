"""Runs an exported program's graph, one ATen operator after another.

The graph is data: a list of operators of ``torch.ops.aten`` and of arithmetic on sizes, with the
names of what they read and write. An operator of any other place, a string argument that is not a
mode, or a graph within the graph is an error when the program is loaded, before anything runs.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from models.runtimes.torch_archive import Archive, ArchiveError
from models.runtimes.torch_arguments import (
    DTYPES,
    UNKNOWN,
    names_in,
    output_names,
    read_argument,
    resolved,
)

ATEN = "torch.ops.aten."
# Arithmetic on sizes, as torch.export writes it.
SIZE_OPERATORS: dict[str, Callable[..., Any]] = {
    "_operator.add": operator.add,
    "_operator.sub": operator.sub,
    "_operator.mul": operator.mul,
    "_operator.floordiv": operator.floordiv,
    "_operator.truediv": operator.truediv,
    "_operator.mod": operator.mod,
    "_operator.neg": operator.neg,
    "_operator.pow": operator.pow,
    "_operator.eq": operator.eq,
    "_operator.ne": operator.ne,
    "_operator.le": operator.le,
    "_operator.lt": operator.lt,
    "_operator.ge": operator.ge,
    "_operator.gt": operator.gt,
    "_operator.and_": operator.and_,
    "_operator.or_": operator.or_,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.trunc": math.trunc,
    "torch.sym_float": float,
    "torch.sym_int": int,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "torch.sym_not": operator.not_,
}
# They check what the exporter assumed, and give nothing.
CHECKS = ("_assert", "sym_constrain_range", "_functional_sym_constrain_range")
# Not bounded to their tensors' memory, or of the world outside it.
PASSING = tuple(f"aten.{one}." for one in ("view", "reshape", "flatten", "squeeze", "clone"))
REFUSED = ("from_file", "_unsafe_index", "set_", "resize", "_print", "record_stream", "_resize")


@dataclass(frozen=True)
class Step:
    """One operator."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[str, ...]
    is_list: bool  # it gives several tensors
    last_uses: tuple[str, ...]  # values that nothing after it reads: freed


class Program:
    """An exported program of one input and one output, with its tensors."""

    def __init__(self, archive: Archive) -> None:
        """Resolve every operator and tensor of the graph.

        Raises:
            ArchiveError: something that is no plain network: the message names it.

        """
        self._where = str(archive.path)
        try:
            graph = archive.graph_module["graph"]
            signature = archive.graph_module["signature"]
            self.tensors, self._input = self._inputs(signature, archive)
            self._output = self._output_of(signature)
            self.input = graph["tensor_values"][self._input]  # TensorMeta
            self.output = graph["tensor_values"][self._output]
            steps = [self._step(node) for node in graph["nodes"]]
        except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
            told = f"{self._where} is damaged: {type(error).__name__} {error}"
            raise ArchiveError(told) from error
        found = [step for step in steps if step is not None]
        self._check_names(found)
        self._steps = self._with_last_uses(found)

    def __call__(
        self, images: torch.Tensor, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Run the graph on the input's tensor, with its own or other weights."""
        values: dict[str, Any] = {**(tensors or self.tensors), self._input: images}
        for step in self._steps:
            args = [resolved(arg, values) for arg in step.args]
            kwargs = {key: resolved(arg, values) for key, arg in step.kwargs.items()}
            found = step.run(*args, **kwargs)
            if step.is_list:
                values.update(zip(step.outputs, found, strict=True))
            elif step.outputs:
                values[step.outputs[0]] = found
            for name in step.last_uses:
                del values[name]
        answer: torch.Tensor = values[self._output]
        return answer

    @property
    def last_operator(self) -> str:
        """The operator that the output is of, as ``aten.sigmoid.default``; reshapes left out."""
        name = self._output
        for step in reversed(self._steps):
            if name not in step.outputs:
                continue
            if not str(step.run).startswith(PASSING) or not (given := names_in(step.args[:1])):
                return str(step.run)
            name = min(given)
        return ""

    def _inputs(
        self, signature: Mapping[str, Any], archive: Archive
    ) -> tuple[dict[str, torch.Tensor], str]:
        tensors: dict[str, torch.Tensor] = {}
        taken: list[str] = []
        for spec in signature["input_specs"]:
            ((kind, facts),) = spec.items()
            if kind == "user_input":
                taken.append(facts["arg"]["as_tensor"]["name"])
            elif kind in ("parameter", "buffer", "tensor_constant"):
                key = facts[f"{kind}_name"]
                tensors[facts["arg"]["name"]] = self._tensor(key, archive)
            else:
                raise ArchiveError(f"{self._where} has an input of kind {kind!r}; none is taken")
        if len(taken) != 1:
            raise ArchiveError(f"{self._where} has {len(taken)} inputs; a member has one image")
        return tensors, taken[0]

    def _tensor(self, key: str, archive: Archive) -> torch.Tensor:
        payload = archive.payloads[key]
        meta = payload["tensor_meta"]
        if meta["dtype"] not in DTYPES:
            raise ArchiveError(f"{self._where}: {key} is of ScalarType {meta['dtype']}: not read")
        content = archive.content[payload["file"]]
        sides = [side["as_int"] for side in meta["sizes"]]
        if 0 in sides:
            return torch.empty(sides, dtype=DTYPES[meta["dtype"]])
        strides = [stride["as_int"] for stride in meta["strides"]]
        offset = meta["storage_offset"]["as_int"]
        try:
            flat = torch.frombuffer(bytearray(content), dtype=DTYPES[meta["dtype"]])
            return flat.as_strided(sides, strides, offset)
        except (RuntimeError, ValueError) as error:  # as_strided stays within the bytes
            raise ArchiveError(f"{self._where}: {key} does not fit its bytes: {error}") from error

    def _output_of(self, signature: Mapping[str, Any]) -> str:
        given = []
        for spec in signature["output_specs"]:
            ((kind, facts),) = spec.items()
            if kind != "user_output":
                raise ArchiveError(
                    f"{self._where} changes its own tensors ({kind}): call .eval() before export"
                )
            given.append(facts["arg"]["as_tensor"]["name"])
        if len(given) != 1:
            raise ArchiveError(f"{self._where} has {len(given)} outputs; a member has one")
        return str(given[0])

    def _step(self, node: Mapping[str, Any]) -> Step | None:
        target = str(node["target"])
        if target.startswith(ATEN) and target[len(ATEN) :].startswith(CHECKS):
            return None
        run = self._operator(target)
        args, kwargs = [], {}
        for given in node["inputs"]:
            value = self._argument(given["arg"], str(given["name"]), target)
            if given.get("kind") == 2:
                kwargs[str(given["name"])] = value
            else:
                args.append(value)
        outputs, is_list = output_names(node["outputs"])
        return Step(run, tuple(args), kwargs, outputs, is_list, ())

    def _operator(self, target: str) -> Callable[..., Any]:
        if target in SIZE_OPERATORS:
            return SIZE_OPERATORS[target]
        name, _, overload = target.removeprefix(ATEN).partition(".")
        if not target.startswith(ATEN) or name.startswith(REFUSED) or "." in overload:
            raise ArchiveError(
                f"{self._where} calls {target}, which is no operator of a network; only those of "
                f"{ATEN[:-1]} are run. Export the network itself, without code around it"
            )
        found = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if not isinstance(found, torch._ops.OpOverload):
            raise ArchiveError(
                f"{self._where} needs {target}, which PyTorch {torch.__version__} lacks: use the "
                "PyTorch that exported it, or export it again with this one"
            )
        run: Callable[..., Any] = found
        return run

    def _argument(self, arg: Mapping[str, Any], name: str, target: str) -> Any:
        ((kind, value),) = arg.items()
        found = read_argument(kind, value, name)
        if found is UNKNOWN:
            told = f"{self._where}: {target} has {name} = {value!r} ({kind}), which is not read"
            raise ArchiveError(told)
        return found

    def _check_names(self, steps: Sequence[Step]) -> None:
        """Check that every value is there when it is read."""
        there = {*self.tensors, self._input}
        for step in steps:
            if missing := names_in((step.args, tuple(step.kwargs.values()))) - there:
                told = f"{self._where} is damaged: it reads {min(missing)!r} before it is there"
                raise ArchiveError(told)
            there |= set(step.outputs)
        if self._output not in there:
            raise ArchiveError(f"{self._where} is damaged: nothing gives {self._output!r}")

    def _with_last_uses(self, steps: Sequence[Step]) -> list[Step]:
        kept = {*self.tensors, self._output}
        later: set[str] = set(kept)
        done: list[Step] = []
        for step in reversed(steps):
            named = names_in((step.args, tuple(step.kwargs.values()))) | set(step.outputs)
            last = tuple(sorted(named - later))
            later |= named
            done.append(replace(step, last_uses=last))
        return done[::-1]
