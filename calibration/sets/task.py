"""Determines a network's task, and the ending it lacks: a softmax, a sigmoid or nothing.

A network that ends in a sigmoid scores each class by itself (multi-label). Any other gives logits
or a distribution: classes that exclude each other, unless ``--task`` says multi-label.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.record import Task

Outputs = Literal["auto", "logits", "probabilities"]
Ending = Literal["softmax", "sigmoid"]
SLACK = 1e-4  # how far a value may be outside of 0..1
SUM_SLACK = 1e-2  # how far a row's sum may be from 1
ROUNDED_SUM_SLACK = 0.5  # likewise, of a softmax whose values are rounded, by its own operator
# What makes rows of logits those of a task.
ENDINGS: Mapping[Task, Ending] = {"classification": "softmax", "multi_label": "sigmoid"}


def task_of(path: Path, outputs: Outputs, asked: Task | None, own: Ending | None) -> Task:
    """Return a network's task: the one asked for, or by default that of its ending (``own``).

    Raises:
        ModelSetError: classification was asked for, but the network ends in a sigmoid.

    """
    is_scored = own == "sigmoid" and outputs != "logits"  # or what is in front of it is not meant
    if asked == "classification" and is_scored:
        raise ModelSetError(
            f"{path} ends in a sigmoid, a score for each class by itself: that is --task "
            "multi_label. If its classes exclude each other, export what goes into the sigmoid"
        )
    return asked or ("multi_label" if is_scored else "classification")


def missing_ending(
    rows: Probabilities, path: Path, outputs: Outputs, task: Task, own: Ending | None
) -> Ending | None:
    """Return the layer to append to a network that answers ``rows``, float32 (N, C).

    ``own`` is the ending of its graph; the rows decide only if that is unclear.

    Raises:
        ModelSetError: the rows are not numbers, or do not fit the task; or, with ``--outputs
            auto``, it is unclear whether they are logits.

    """
    check_numbers(rows, path)
    if outputs == "logits":
        return ENDINGS[task]
    if task == "classification":
        return _missing_softmax(rows, path, outputs, own)
    if own == "sigmoid":
        return None
    if is_distribution(rows):
        raise ModelSetError(
            f"{path} gives probabilities that sum to 1, of classes that exclude each other: no "
            "member of a multi_label set. Export what goes into the softmax, and say --outputs "
            "logits"
        )
    is_score = bool(rows.min() >= -SLACK and rows.max() <= 1 + SLACK)
    if outputs == "probabilities":
        if not is_score:
            raise ModelSetError(
                f"{path} does not give scores: values must be 0..1, and are {_range(rows)}; if it "
                "ends in logits, say --outputs logits"
            )
        return None
    if is_score:
        raise ModelSetError(
            f"{path} answers {_range(rows)} to images, and no sigmoid ends it: these may be scores "
            "or logits; say --outputs probabilities, or --outputs logits"
        )
    return "sigmoid"


def check_numbers(rows: Probabilities, path: Path) -> None:
    """Raise :class:`ModelSetError` if a network's answers, (N, C), contain NaN or infinity."""
    if np.isnan(rows).any():
        raise ModelSetError(
            f"{path} does not give probabilities, but answers NaN to an image, and no weight is "
            "NaN: it divides by zero (a pooling window that sees only padding), or was made for "
            "another mean and scale"
        )


def _missing_softmax(
    rows: Probabilities, path: Path, outputs: Outputs, own: Ending | None
) -> Ending | None:
    if is_distribution(rows):
        return None
    if own == "softmax":
        if np.allclose(rows.sum(axis=1), 1, atol=ROUNDED_SUM_SLACK):
            return None
        raise ModelSetError(
            f"{path} ends in a softmax, but its rows sum to {_range(rows.sum(axis=1))}: it is over "
            "another dimension than the classes. Export it again with a softmax over dimension 1"
        )
    if outputs == "probabilities":
        raise ModelSetError(
            f"{path} does not give probabilities: rows must be 0..1 and sum to 1; if it ends in "
            "logits, say --outputs logits"
        )
    return "softmax"


def is_distribution(rows: Probabilities) -> bool:
    """Whether each row of (N, C) is 0..1 and sums to one."""
    is_one = np.allclose(rows.sum(axis=1), 1, atol=SUM_SLACK)
    return bool(rows.min() >= -SLACK and is_one)


def gives(task: Task, added: Ending | None) -> str:
    """Return a phrase with a network's output and the ending that was added, for people."""
    if added is not None:
        return f"gives logits, to which a {added} was added"
    return "gives scores" if task == "multi_label" else "gives probabilities"


def set_task(of_files: Mapping[str, Task]) -> Task:
    """Return the common task of a set's networks, by member and file.

    Raises:
        ModelSetError: they differ.

    """
    tasks = set(of_files.values())
    if len(tasks) == 1:
        return tasks.pop()
    scored = ", ".join(name for name, task in of_files.items() if task == "multi_label")
    others = ", ".join(name for name, task in of_files.items() if task == "classification")
    raise ModelSetError(
        f"these do not make one set: {scored} end in a sigmoid (a score for each class by itself), "
        f"{others} do not. Say which it is: --task multi_label puts a sigmoid behind logits; for "
        "--task classification export what goes into the sigmoids"
    )


def _range(rows: Probabilities) -> str:
    return f"{float(rows.min()):.3g} to {float(rows.max()):.3g}"
