"""Reads photographs of classes to learn from: folders of classes, or lists of file and label.

What cannot be learned from is left out, named and counted, and never stops a folder of thousands.
"""

import csv
import hashlib
import io
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibration.datasets import ImageFile, find_images, folder_files, listed_files, short_name
from models.errors import ModelSetError
from models.image_files import first_not_utf8, images_below, is_hidden
from models.model_set import ModelSet, in_number_order, some
from models.network import Pixels

NONE = "none"  # the class of photographs that show none of the others
NAME = "photographs.csv"  # in a learned set
DISAGREES = "disagrees"  # the key in samples on which versions of a set disagree
COLUMNS = ("sha256", "label", "name")
UNFIT = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]")  # a label is a line of a file


@dataclass(frozen=True)
class Photograph:
    """One photograph and its class; ``path`` is None if only its hash is known."""

    sha256: str
    label: str
    name: str  # of its folder and file, for people
    path: Path | None = None
    pixels: Pixels | None = None  # of a crop that is no file, as in ImageInputs
    origin: str | None = None  # of crops: those of one photograph are near-duplicates


@dataclass
class Found:
    """The photographs of some folders and lists, and what was left out of them."""

    photographs: list[Photograph] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_photographs(sources: Sequence[Path], others: Path | None = None) -> Found:
    """Read folders of classes (``source/<class>/<file>``) and lists of ``file,label`` lines.

    ``others`` is a folder of any depth, whose photographs are of the class ``none``. Raises
    :class:`ModelSetError` if a source has no photographs, or names of classes differ in case alone.
    """
    gathered, named = Found(), list[tuple[Path, str]]()
    for source in sources:
        named += _of_folder(source, gathered) if source.is_dir() else _of_list(source)
    if others is not None:
        labels = {label for _, label in named}
        none = next((label for label in labels if label.casefold() == NONE), NONE)
        named += [(path, none) for path in find_images(others)]
    named = [(path, _checked_label(label, path)) for path, label in named]
    check_names({label for _, label in named})
    gathered.photographs = _hashed(named, gathered)
    return gathered


def _of_list(source: Path) -> list[tuple[Path, str]]:
    if not source.is_file():
        raise ModelSetError(
            f"{source} is neither a folder nor a list; give a folder of classes "
            "(FOLDER/<class>/<file>), or a CSV of file,label"
        )
    return listed_files(source)


def _of_folder(source: Path, gathered: Found) -> list[tuple[Path, str]]:
    below = images_below(source)
    try:
        named = folder_files(source)
    except ModelSetError:
        if not below:
            raise
        _refuse_depth(source, below)
    classes = sorted(p.name for p in source.iterdir() if p.is_dir() and not is_hidden(p.name))
    if empty := sorted({*classes} - {label for _, label in named}):
        gathered.notes.append(f"{len(empty)} folders without photographs in them: {some(empty)}")
    if elsewhere := sorted({*below} - {path for path, _ in named}):
        gathered.notes.append(
            f"{len(elsewhere)} photographs are left out, which lie in no class or deeper than one "
            f"folder, as {elsewhere[0].relative_to(source)}"
        )
    return named


def _refuse_depth(source: Path, below: Sequence[Path]) -> None:
    if any(path.parent == source for path in below):
        raise ModelSetError(
            f"{source} has photographs, and no folders of classes: put those of each class in a "
            f"folder of its name ({source}/<class>/<file>), or give a CSV of file,label"
        )
    inner = below[0].parent.parent
    raise ModelSetError(
        f"{source}: photographs lie deeper than {source.name}/<class>/<file>, as "
        f"{below[0].relative_to(source)}; if its classes are the folders of {inner}, give that"
    )


def _checked_label(label: str, path: Path) -> str:
    """Return a label as it can be a line of a file; raise if it cannot."""
    if first_not_utf8([label]) is not None or UNFIT.search(label) or not label.strip():
        raise ModelSetError(
            f"{label!r}, of {path}, cannot be the name of a class: it is empty, not UTF-8 or has "
            "line ends; rename it"
        )
    return unicodedata.normalize("NFC", label).strip()


def check_names(labels: Iterable[str]) -> None:
    """Raise :class:`ModelSetError` if names of classes differ in upper and lower case alone."""
    known = dict[str, str]()
    for label in sorted(labels):
        before = known.setdefault(label.casefold(), label)
        if before != label:
            raise ModelSetError(
                f"the classes {before!r} and {label!r} differ in case alone: rename one, or put "
                "their photographs together"
            )


def _hashed(named: Sequence[tuple[Path, str]], gathered: Found) -> list[Photograph]:
    """Return each photograph once; those in two classes, and unreadable files, are left out."""
    by_hash, labels = dict[str, Photograph](), dict[str, set[str]]()
    unreadable, num_again = list[str](), 0
    for path, label in named:
        try:
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            unreadable.append(f"{path} ({error.strerror})")
            continue
        num_again += label in labels.get(sha256, ())
        labels.setdefault(sha256, set()).add(label)
        by_hash.setdefault(sha256, Photograph(sha256, label, short_name(path), path))
    if unreadable:
        gathered.notes.append(f"{len(unreadable)} files cannot be read: {some(unreadable)}")
    if num_again:
        gathered.notes.append(f"{num_again} files are copies of others in their class: one counts")
    doubled = [sha256 for sha256, of in labels.items() if len(of) > 1]
    if doubled:
        shown = [f"{by_hash[s].path} ({' and '.join(sorted(labels[s]))})" for s in doubled]
        gathered.notes.append(
            f"{len(doubled)} photographs are in two classes, and are left out of both: "
            f"{some(shown)}"
        )
    return [photograph for s, photograph in by_hash.items() if s not in doubled]


def without_single(photographs: Sequence[Photograph], notes: list[str]) -> list[Photograph]:
    """Leave classes of one photograph out, with a note; raise if fewer than two classes are left.

    A photograph that is held out needs another of its class to learn from.
    """
    counts = Counter(photograph.label for photograph in photographs)
    if single := [label for label in in_number_order(counts) if counts[label] == 1]:
        notes.append(f"{len(single)} classes of one photograph are left out: {some(single)}")
    if len(counts) - len(single) < 2:
        left = [label for label in counts if label not in single]
        have = f"only {left[0]} has" if left else "none has"
        raise ModelSetError(
            f"two classes or more are needed, of two photographs or more each; {have}"
            + "".join(f"; {note}" for note in notes)
        )
    return [photograph for photograph in photographs if counts[photograph.label] > 1]


def add_corrections(gathered: Found, folders: Sequence[Path]) -> None:
    """Add the photographs that people taught a service, and the samples whose label they said.

    ``folders``, with all below them, are ``teach_dir`` and ``sample_dir`` of a service. A JSON file
    with a label and a file is a photograph that was taught; with a label and a request it labels
    the sample whose name ends with the request's hash. What was said last of a photograph counts,
    and more than its folder.

    Raises :class:`ModelSetError` if none of the folders has a photograph with a label.
    """
    said, of_requests = list[tuple[str, Path, str]](), list[tuple[str, str, str]]()
    samples, disputed = dict[str, Path](), set[str]()
    for path, content in _json_files(folders):
        file = path.parent / Path(str(content.get("file", ""))).name
        when, label = str(content.get("time", "")), content.get("label")
        if label is None:
            request = path.stem.rpartition("-")[2]
            samples[request] = file
            disputed |= {request} if DISAGREES in content else set()
        elif "request" in content:
            of_requests.append((when, str(content["request"]), str(label)))
        else:
            said.append((when, file, str(label)))
    said += [(when, samples[of], label) for when, of, label in of_requests if of in samples]
    known, unreadable = dict[str, Photograph](), list[str]()
    for _, path, label in sorted(said):
        try:
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            unreadable.append(f"{path} ({error.strerror})")
            continue
        known[sha256] = Photograph(sha256, _checked_label(label, path), short_name(path), path)
    if not known:
        raise ModelSetError(
            f"no photograph with a label lies in {some([str(folder) for folder in folders])}: "
            "--corrections takes the teach_dir of a service, and its sample_dir"
        )
    gathered.photographs = [p for p in gathered.photographs if p.sha256 not in known]
    gathered.photographs += known.values()
    if unreadable:
        gathered.notes.append(f"{len(unreadable)} files cannot be read: {some(unreadable)}")
    if left := [str(samples[of]) for of in sorted(disputed - {of for _, of, _ in of_requests})]:
        gathered.notes.append(
            f"{len(left)} samples that versions answer differently have no label, and are left "
            f"out: report feedback for them, or teach them: {some(left)}"
        )


def _json_files(folders: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files of a service's folders that are JSON objects; others are passed over."""
    for folder in folders:
        for path in sorted(folder.rglob("*.json")):
            try:
                content = json.loads(path.read_bytes())
            except (OSError, ValueError):
                continue  # being written or removed, or another's
            if isinstance(content, dict):
                yield path, content


def joined(before: Sequence[Photograph], gathered: Found) -> list[Photograph]:
    """Return a set's earlier photographs with those found now, whose classes count."""
    now = {photograph.sha256: photograph for photograph in gathered.photographs}
    moved = [p for p in before if p.sha256 in now and now[p.sha256].label != p.label]
    if moved:
        shown = [f"{p.name} (now {now[p.sha256].label})" for p in moved]
        gathered.notes.append(f"{len(moved)} photographs change their class: {some(shown)}")
    check_names({photograph.label for photograph in (*before, *gathered.photographs)})
    return [*(p for p in before if p.sha256 not in now), *gathered.photographs]


def classes_of(photographs: Sequence[Photograph], before: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the classes in a set's earlier order, then the new ones in that of their names."""
    labels = {photograph.label for photograph in photographs}
    kept = [label for label in before if label in labels]
    return (*kept, *in_number_order(labels - {*kept}))


def as_text(photographs: Sequence[Photograph]) -> str:
    """Return the list that a learned set keeps of its photographs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((p.sha256, p.label, p.name) for p in photographs)
    return text.getvalue()


def photographs_of(model_set: ModelSet) -> list[Photograph]:
    """Return the photographs that a set was learned from; empty if it was made otherwise."""
    if (record := model_set.manifest.photographs) is None:
        return []
    rows = csv.reader(io.StringIO(model_set.verified(record).read_text("utf-8")))
    next(rows)  # the header
    return [Photograph(sha256, label, name) for sha256, label, name in rows]


def images_of(photographs: Sequence[Photograph]) -> list[ImageFile]:
    """Return the files of photographs, by their names where the paths are not known."""
    return [ImageFile(photograph.path or Path(photograph.name)) for photograph in photographs]
