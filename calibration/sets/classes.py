"""Maps a network's classes to a set's by their ids, in the network itself.

Class lists of the same problem differ in order, and by a class for "none of them" ("background").
Mapping by position would confuse them silently, so they are mapped by id. Classes of a network that
the set lacks are left out before softmax: the others share their probability in proportion. The
scores of a multi-label network are independent and stay as they are.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from models.errors import ModelSetError
from models.record import Task

LEAST_SUM = np.float32(1e-12)
NUM_NAMED = 5


@dataclass(frozen=True)
class ClassMap:
    """The ids of a network's classes and of the set's, each in its own order."""

    own: tuple[str, ...]
    wanted: tuple[str, ...]
    where: str  # the file of the network's own

    def __post_init__(self) -> None:
        doubled = [name for name, count in Counter(self.own).items() if count > 1]
        if doubled:
            raise ModelSetError(f"{self.where} has class ids twice: {_some(doubled)}")
        missing = [name for name in self.wanted if name not in set(self.own)]
        if missing:
            raise ModelSetError(
                f"{self.where} lacks {len(missing)} of the set's {len(self.wanted)} classes: "
                f"{_some(missing)}. Each member must know every class of the set: leave them out "
                "of --labels and --class-ids, or the member"
            )

    def check_fits(self, num_classes: int, path: Path) -> None:
        """Raise :class:`ModelSetError` unless the network in ``path`` has a class per id."""
        if num_classes != len(self.own):
            raise ModelSetError(
                f"{path} has {num_classes} classes, {self.where} {len(self.own)} ids: they are "
                "not of the same network"
            )

    @property
    def positions(self) -> list[int]:
        """The position of each of the set's classes among the network's."""
        places = {name: place for place, name in enumerate(self.own)}
        return [places[name] for name in self.wanted]


def select_classes(
    model: ov.Model, classes: ClassMap, path: Path, task: Task = "classification"
) -> ov.Model:
    """Return the network with rows of the set's classes, in the set's order.

    Scores of a multi-label network stay as they are.

    Raises:
        ModelSetError: the numbers of the network's classes and ids differ.

    """
    (num_classes,) = list(model.output().partial_shape)[1:]
    classes.check_fits(num_classes, path)
    if classes.own == classes.wanted:
        return model
    end = model.output().get_node().input_value(0)
    last = end.get_node()
    if task == "multi_label":
        picked = _picked(end, classes)
    elif last.get_type_name() == "Softmax" and len(last.input_value(0).get_partial_shape()) == 2:
        picked = ops.softmax(_picked(last.input_value(0), classes), axis=1)
    else:
        rows = _picked(end, classes)
        sums = ops.reduce_sum(rows, np.array([1]), keep_dims=True)
        picked = ops.divide(rows, ops.maximum(sums, LEAST_SUM))
    picked.get_output_tensor(0).set_names({"probabilities"})
    return ov.Model([picked.output(0)], model.get_parameters(), model.friendly_name)


def _picked(rows: ov.Output, classes: ClassMap) -> ov.Node:
    return ops.gather(rows, np.array(classes.positions, np.int32), np.int32(1))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more
