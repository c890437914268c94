"""Finds, loads and verifies model sets on disk."""

import logging
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isclose
from pathlib import Path

from platformdirs import user_data_path

from models.ensemble import AnswerRule
from models.errors import ModelSetError, reading
from models.files import user_folder, with_home
from models.golden import Golden, read_golden
from models.machine import check_installed
from models.manifest import MANIFEST_NAME, Manifest, read_manifest
from models.network import memory_needed
from models.plan import AverageRecord, TrustTable
from models.record import PRECISIONS, FileRecord, Precision, sha256_of
from models.stores import earlier_folders, fetch, is_url, split_version

BUNDLED_DIR = Path(__file__).parent  # models/<set>/ next to this code
PRECISION_VARIABLE = "TANDEM_PRECISION"  # the service's setting, which holds without one too
PARTIAL_SUFFIX = ".partial"  # of a folder that is being made or removed
REPLACED_SUFFIX = f".old{PARTIAL_SUFFIX}"
logger = logging.getLogger(__name__)


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
