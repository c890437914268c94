"""Class names and numbers: the class of a set that a folder, a list or a caller means.

A class is named by its id (``class_ids`` of the set), its label or its number from 0, also with
zeros before it (007). Where ids or labels are numbers themselves, these are meant.
Where the order of names as text and that by their numbers differ, and nothing tells which is meant,
they are refused.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from models.errors import ModelSetError
from models.model_set import ModelSet

MAX_DIGITS = 9


def number_of(name: str) -> int | None:
    """Return the class number that a name is; None if it is none."""
    return int(name) if name.isdecimal() and len(name) <= MAX_DIGITS else None


def in_number_order(names: Collection[str]) -> list[str]:
    """Return the names sorted by the numbers in them: ``class 2`` before ``class 10``."""

    def key(name: str) -> list[int | str]:
        parts = re.split(rf"(\d{{1,{MAX_DIGITS}}})", name)
        return [int(part) if place % 2 else part for place, part in enumerate(parts)]

    return sorted(names, key=key)


def as_numbers(
    names: Collection[str], labels: Sequence[str], ids: Sequence[str] | None
) -> dict[str, int] | None:
    """Return the class number that each name is; None if not all are numbers of classes.

    None too if the classes' own ids or labels are other numbers.
    """
    numbers = {name: number_of(name) for name in names}
    for known in filter(None, (ids, labels)):
        own = [number_of(name) for name in known]
        if None not in own and own != list(range(len(own))):
            return None
        if any(name in known and known.index(name) != n for name, n in numbers.items()):
            return None
    places = {name: n for name, n in numbers.items() if n is not None and n < len(labels)}
    return places if len(places) == len(numbers) else None


def class_named(
    name: str | int, labels: Sequence[str], ids: Sequence[str] | None = None
) -> int | None:
    """Return the class that a label, an id or a number names; None if there is none.

    An integer is always a class number. Of two classes with one label the first is meant.
    """
    if isinstance(name, int):
        return name if 0 <= name < len(labels) else None
    for known in (ids or (), labels):  # as class_indices
        if name in known:
            return known.index(name)
    return (as_numbers([name], labels, ids) or {}).get(name)


def class_indices(
    names: list[str], model_set: ModelSet, source: Path, ids: Sequence[str] | None = None
) -> tuple[dict[str, int], list[str]]:
    """Return the class index of each name, and a note if it could be read otherwise.

    ``ids`` are the classes' in the networks' order; None: the set's own.
    """
    labels, ids = model_set.labels, ids or model_set.class_ids
    numbers = as_numbers(names, labels, ids)
    for known in (ids or (), labels):
        if set(names) <= set(known):
            _check_unambiguous(names, known, model_set, source)
            index_of = {name: known.index(name) for name in names}
            by_number = {name: number_of(name) for name in names}
            is_other = None not in by_number.values() and by_number != index_of
            what = "ids" if known is ids else "labels"
            note = f"names are the set's {what}, which are numbers, and not class numbers"
            return index_of, [note] if is_other else []
    if numbers is not None:
        is_other = source.is_dir() and names != in_number_order(names)
        note = (
            "folder names are class numbers: a network trained on these folders in the order of "
            "text (0, 1, 10, 2) has other classes; name these by --labels or --class-ids"
        )
        from_one = (
            "no folder is 0: if they count from 1, each is one class too high; name them by label"
        )
        notes = [note] if is_other else []
        return numbers, [
            *notes,
            from_one,
        ] if source.is_dir() and 0 not in numbers.values() else notes
    is_by_order = source.is_dir() and len(names) == len(labels) and ids is None
    if is_by_order and not set(names) & set(labels):
        _check_order(names, model_set, source)
        note = "folder names are no classes of the set: taken as its classes in sorted order"
        return {name: index for index, name in enumerate(names)}, [note]
    in_range = {name for name in names if as_numbers([name], labels, ids)}
    strangers = sorted({*names} - {*labels, *(ids or ())} - in_range)
    if not strangers:
        raise ModelSetError(
            f"{source} names classes in more than one way, as {some(names)}: name all of them by "
            "id, all by label, or all by number"
        )
    by_id = (
        "; for names by id give --class-ids FILE, or the set: tandem models labels "
        f"{model_set.argument} --class-ids FILE"
    )
    raise ModelSetError(
        f"{source}: {len(strangers)} labels are no classes of {model_set.name}, as "
        f"{some(strangers)}; it has {len(labels)}: {some(list(ids or labels))}. "
        f"Name folders (or labels) as the set does{'' if ids else by_id}"
    )


def _check_order(names: list[str], model_set: ModelSet, source: Path) -> None:
    """Raise unless the order of folders as text is that by their numbers, which begin at 1."""
    by_number = in_number_order(names)
    numbers = [number_of(name) for name in by_number]
    is_other = names != by_number
    if not is_other and (None in numbers or numbers == list(range(1, len(names) + 1))):
        return
    name = next((n for n, other in zip(names, by_number, strict=True) if n != other), names[-1])
    place, other = names.index(name), by_number.index(name)
    as_number = f"counted by number class {other}" if is_other else f"as a number class {name}"
    raise ModelSetError(
        f"{source}: nothing tells which class the folder {name} is: in sorted order it is class "
        f"{place} of {model_set.name} ({model_set.labels[place]}), {as_number}. Name the folders "
        f"as the labels, or as class numbers from 0 to {len(names) - 1}"
    )


def _check_unambiguous(
    names: list[str], known: Sequence[str], model_set: ModelSet, source: Path
) -> None:
    counts = Counter(known)
    for name in names:
        if counts[name] > 1:
            places = ", ".join(str(i) for i, other in enumerate(known) if other == name)
            has_ids = known is model_set.labels and model_set.class_ids
            how = "the class ids" if has_ids else "a list (CSV of file,label) with the numbers"
            raise ModelSetError(
                f"{source}: {name} is the name of {counts[name]} classes of {model_set.name} "
                f"(numbers {places}): which is meant? Use {how} instead"
            )


def some(names: list[str], limit: int = 5) -> str:
    """Return the first names as text, with the number of all."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"
