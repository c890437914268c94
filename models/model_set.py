"""Model sets on disk: found, loaded and verified; and which class of a set a name means.

A class is named by its id (``class_ids`` of the set), its label or its number from 0, also with
zeros before it (007). Where ids or labels are numbers themselves, these are meant.
Where the order of names as text and that by their numbers differ, and nothing tells which is meant,
they are refused.
"""

import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isclose
from pathlib import Path

from platformdirs import user_data_path

from models.ensemble import AnswerRule, AverageRecord, TrustTable
from models.errors import ModelSetError, reading
from models.files import user_folder, with_home
from models.golden import Golden, read_golden
from models.machine import check_installed
from models.manifest import MANIFEST_NAME, Manifest, read_manifest
from models.network import memory_needed
from models.record import PRECISIONS, FileRecord, Precision, sha256_of
from models.stores import earlier_folders, fetch, is_url, split_version

BUNDLED_DIR = Path(__file__).parent  # models/<set>/ next to this code
PRECISION_VARIABLE = "TANDEM_PRECISION"  # the service's setting, which holds without one too
PARTIAL_SUFFIX = ".partial"  # of a folder that is being made or removed
REPLACED_SUFFIX = f".old{PARTIAL_SUFFIX}"
logger = logging.getLogger(__name__)
MAX_DIGITS = 9  # of a class number


def search_path(first: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Return the folders that are searched for sets: ``first``, the user's own, the bundled."""
    own = user_folder(user_data_path, "models")
    return (*first, *([own] if own else []), BUNDLED_DIR)


def replaced_folder(folder: Path) -> Path:
    """Return the path at which a set's folder is kept while another replaces it."""
    return folder.parent / f".{folder.name}{REPLACED_SUFFIX}"


@dataclass(frozen=True)
class ModelSet:
    """A folder and its manifest; files are hashed when they are used."""

    folder: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def argument(self) -> str:
        """The set's name for commands: its name if that finds it, or else its folder's path."""
        first = next((p for d in search_path() if (p := _place_of(d / self.folder.name))), None)
        is_found = first is not None and first.samefile(self.folder)
        return self.folder.name if is_found else shlex.quote(str(self.folder.absolute()))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return a label per class, in the networks' order."""
        return self._one_per_class(self.manifest.labels, "labels")

    @cached_property
    def answer_rule(self) -> AnswerRule:
        """Return the rule that interprets the set's rows."""
        return AnswerRule(self.labels, self.manifest.threshold)

    @cached_property
    def trust(self) -> TrustTable:
        """Return what each average of the members is worth."""
        return self.manifest.trust_table

    @cached_property
    def class_ids(self) -> tuple[str, ...] | None:
        """Return the folder name of each class in datasets, in the networks' order, or None."""
        record = self.manifest.class_ids
        return None if record is None else self._one_per_class(record, "class ids")

    @cached_property
    def golden(self) -> Golden | None:
        """Return the recorded answers to the generated images, or None."""
        record = self.manifest.golden
        return None if record is None else read_golden(self.verified(record))

    def weighted(self, weights: Mapping[str, float]) -> "ModelSet":
        """Return the set with only the members in ``weights``, and these weights.

        Raises :class:`ModelSetError` if the set lacks one of the members.
        """
        for name in weights:
            self.manifest.member(name)
        kept = (member for member in self.manifest.members if member.name in weights)
        members = tuple(m.model_copy(update={"weight": weights[m.name]}) for m in kept)
        trust = self._trust_of(weights)
        update = {"members": members, "temperature": trust.temperature, "sure": trust.sure}
        update |= {"answer_set": trust.answer_set, "trust": (), "fast_plan": None}
        return ModelSet(self.folder, self.manifest.model_copy(update=update))

    def _trust_of(self, weights: Mapping[str, float]) -> AverageRecord:
        """Return what an average is worth, if its weights are in the manifest's proportion."""
        own, manifest = self.manifest.weights, self.manifest
        shares = [weight / own[name] for name, weight in weights.items()]
        if not isclose(min(shares), max(shares)):
            return AverageRecord()
        if weights.keys() == own.keys():
            return manifest.whole_average
        same = (s for s in manifest.trust if set(s.members) == weights.keys())
        return next(same, None) or AverageRecord()

    def _one_per_class(self, record: FileRecord, what: str) -> tuple[str, ...]:
        path = self.verified(record)
        names = read_lines(path)
        if len(names) != self.manifest.num_classes:
            raise ModelSetError(
                f"{path} has {len(names)} {what}, "
                f"the manifest says num_classes: {self.manifest.num_classes}"
            )
        return names

    def fingerprint(self, precision: Precision = "INT8") -> str:
        return self.manifest.fingerprint(precision)

    @property
    def fingerprints(self) -> dict[Precision, str]:
        return self.manifest.fingerprints

    def in_version(self, version: str, precision: Precision | None = None) -> "ModelSet":
        """Return the set in a version, by its fingerprint in ``precision``, or in any.

        Raises:
            ModelSetError: neither the set nor an earlier version kept in it has this fingerprint.
        """
        for kept in (self, *earlier_sets(self.folder)):
            known = kept.fingerprints
            if version in (known.values() if precision is None else [known.get(precision)]):
                return kept
        own = self.fingerprints
        of = "" if precision is None else f" in {precision}"
        now = ", ".join(own.values()) if precision is None else own.get(precision, "none")
        raise ModelSetError(
            f"{self.folder} is version {now}{of}, not {version}, which it does not keep either: "
            f"tandem models history {self.argument} lists its versions"
        )

    @property
    def absent_precisions(self) -> tuple[Precision, ...]:
        """Precisions without any file here: a wheel omits the bundled float networks.

        It never has all precisions: a folder without any network is damaged.
        """
        known = dict.fromkeys(p for member in self.manifest.members for p in member.networks)
        absent = tuple(p for p in known if not any(map(self.is_here, self._network_files(p))))
        return absent if len(absent) < len(known) else ()

    def _network_files(self, precision: Precision) -> list[FileRecord]:
        networks = (member.networks.get(precision) for member in self.manifest.members)
        return [file for network in networks if network is not None for file in network.files]

    def is_here(self, record: FileRecord) -> bool:
        """Whether the file exists in the set's folder, whatever its content."""
        return (self.folder / record.path).is_file()

    def network_path(self, member: str, precision: Precision = "INT8") -> Path:
        """Return the path of a member's network file, after verifying all its files.

        Raises:
            MissingExtraError: its runtime is not installed.
            ModelSetError: the member lacks this precision, or a file is missing or altered.
        """
        network = self.manifest.member(member).network(precision)
        check_installed(network.runtime, network.runtime, f"member {member} of {self.name}")
        opened, *_ = [self.verified(file) for file in network.files]
        return opened

    def memory_needed(self, precision: Precision, num_sizes: int) -> dict[str, int]:
        """Estimate each member's bytes of memory, compiled for ``num_sizes`` batch sizes."""
        return {
            member.name: memory_needed(
                self.folder / member.network(precision).files[0].path,
                member.precision_of(precision),
                num_sizes,
            )
            for member in self.manifest.members
        }

    def verified(self, record: FileRecord) -> Path:
        """Return the file's path after verifying its hash."""
        if problem := self.problem_with(record):
            raise ModelSetError(problem)
        return self.folder / record.path

    def problem_with(self, record: FileRecord) -> str | None:
        """Return the fault of a file; None if it has none."""
        path = self.folder / record.path
        if not self.is_here(record):
            return f"{path} is missing; restore the model set's folder or fetch it again"
        if (actual := sha256_of(path)) != record.sha256:
            return (
                f"{path} was altered: its sha256 is {actual[:12]}…, the manifest says "
                f"{record.sha256[:12]}…; restore the file or make the set again"
            )
        return None

    def problems(self) -> list[str]:
        """Check every file of the set; return a list of problems, empty if there are none.

        Absent precisions are not problems: see :attr:`absent_precisions`.
        """
        absent = {f for p in self.absent_precisions for f in self._network_files(p)}
        files = (record for record in self.manifest.files if record not in absent)
        problems = [p for record in files if (p := self.problem_with(record))]
        if not problems:
            try:
                _ = self.labels
            except ModelSetError as error:
                problems.append(error.message)
        return problems


def read_lines(path: Path) -> tuple[str, ...]:
    """Return the file's lines, stripped, without empty lines and byte order mark.

    Only line ends separate lines: a label may contain U+2028 or a form feed.
    """
    try:
        with reading(path):
            text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelSetError(f"{path} is not UTF-8: {error}; save it as UTF-8") from error
    return tuple(line.strip() for line in text.split("\n") if line.strip())


def load_model_set(
    name_or_path: str, search: tuple[Path, ...] | None = None, precision: Precision | None = None
) -> ModelSet:
    """Load a set by its name (first in ``search``), folder or URL.

    ``@VERSION`` after it requests a version: a fingerprint in ``precision``, or in any.

    Raises:
        ModelSetError: the set or version does not exist, or its manifest is invalid.
        StoreError: the set cannot be fetched from its URL.
    """
    name, version = split_version(name_or_path)
    if is_url(name):
        folder = fetch(name, version)
        loaded = ModelSet(folder, read_manifest(folder))
        version = None if version == folder.name else version  # a manifest's hash: any precision
    else:
        loaded = _load(name, search)
    return loaded if version is None else loaded.in_version(version, precision)


def earlier_sets(folder: Path) -> list[ModelSet]:
    """Return a set's earlier versions, newest first, without those that cannot be read."""
    sets = []
    for place in earlier_folders(folder):
        try:
            sets.append(ModelSet(place, read_manifest(place)))
        except ModelSetError as error:  # damaged, of another Tandem, or removed meanwhile
            logger.warning("%s is left out: %s", place, error.message)
    return sets


def _load(name_or_path: str, search: tuple[Path, ...] | None) -> ModelSet:
    search = search_path() if search is None else search
    as_path = with_home(name_or_path)
    is_path = "/" in name_or_path or as_path.is_absolute()
    candidates = [as_path] if is_path else [directory / name_or_path for directory in search]
    for folder in candidates:
        if (place := _place_of(folder)) is not None:
            return ModelSet(place, read_manifest(place))
    there = ", ".join(sorted(s.name for s in list_folders(search))) or "none"
    places = ", ".join(map(str, candidates))
    hint = "; behind @ is a version, twelve hexadecimal digits" if "@" in name_or_path else ""
    raise ModelSetError(
        f"no model set {name_or_path!r}: no {MANIFEST_NAME} in {places}; sets found: {there}{hint}"
    )


def _place_of(folder: Path) -> Path | None:
    """Return the path of the set ``folder``, also if a command that replaced it was killed.

    The killed command leaves the old set complete, under another name. Without this the search
    would go on and silently find another set of the same name.
    """
    replaced = replaced_folder(folder)
    for place in (folder, replaced, folder):  # once more, since a command may just have finished
        if (place / MANIFEST_NAME).is_file():
            if place == replaced:
                logger.warning(
                    "a command that replaced %s was interrupted: the set from before is used, from "
                    "%s; run that command again, or rename the folder back",
                    *(folder, replaced),
                )
            return place
    return None


def offline_precision(of: ModelSet | Manifest, asked: str | None = None) -> Precision:
    """Return which networks of a set run where no service's settings say it.

    That is ``asked``, else the variable TANDEM_PRECISION; INT8, or else the float ones, if neither
    is set or it is auto. Raises :class:`ModelSetError` if it is none of these.
    """
    wanted = asked or os.environ.get(PRECISION_VARIABLE) or "auto"
    if wanted == "auto":
        return next(iter(of.fingerprints), "INT8")  # none is whole: INT8's error says why
    if (precision := next((p for p in PRECISIONS if p == wanted), None)) is None:
        raise ModelSetError(f"precision {wanted!r}: INT8, FP16 or auto (also TANDEM_PRECISION)")
    return precision


def list_folders(search: tuple[Path, ...]) -> list[Path]:
    """Return the folders that :func:`load_model_set` finds below ``search``, sorted by name."""
    folders = {path.parent for place in search for path in place.glob(f"*/{MANIFEST_NAME}")}
    whole = {folder for folder in folders if not folder.name.endswith(PARTIAL_SUFFIX)}
    aside = {p for p in folders if p.name.startswith(".") and p.name.endswith(REPLACED_SUFFIX)}
    replaced = {p.with_name(p.name[1:].removesuffix(REPLACED_SUFFIX)) for p in aside}
    return sorted(whole | replaced)


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
