"""Loads the versions of a set that share its traffic, names them and checks that they fit."""

from itertools import combinations

from app.errors import ConfigError, UnverifiedError
from app.graph.set_checks import check_accuracy, served_sets
from app.settings import Settings
from app.traffic.plan import Split
from models.ledger import judge
from models.model_set import ModelSet
from models.record import Precision


def loaded_sets(settings: Settings) -> list[ModelSet]:
    """Load the sets that the settings serve: versions of one set, or several sets.

    Raises what :func:`served_versions` and :func:`app.graph.set_checks.served_sets` raise.
    """
    return served_versions(settings) if settings.has_versions else served_sets(settings)


def accuracy_warnings(settings: Settings, model_sets: list[ModelSet]) -> list[str]:
    """Return the warnings of the accuracy records of sets from :func:`loaded_sets`.

    Raises:
        UnverifiedError: a set that is to answer lost too much; for a shadow it is a warning.

    """
    shares = _shares(settings) if settings.has_versions else [100.0] * len(model_sets)
    warnings = []
    for model_set, share in zip(model_sets, shares, strict=True):
        verdict = judge(model_set.manifest, settings.served_precision, model_set.argument)
        if share:
            verdict = check_accuracy(model_set, settings)
        if verdict.status != "verified":
            warnings.append(verdict.message)
    return warnings


def _shares(settings: Settings) -> list[float]:
    """Return the share of each version that the settings name, in their order."""
    shares = settings.traffic or {settings.model_set: 100.0}
    return [shares.get(own.model_set, 0.0) for own in settings.of_each_version()]


def served_versions(settings: Settings) -> list[ModelSet]:
    """Load the versions that the settings name, the one with the largest share first.

    Raises:
        ModelSetError: a version cannot be loaded.
        ConfigError: two versions are the same, or of different sets or classes.

    """
    served = settings.served_precision
    sets = [own.load_set() for own in settings.of_each_version()]
    for first, other in combinations(sets, 2):
        check_fits(first, other)
        if (name := version_name(other, served)) == version_name(first, served):
            raise ConfigError(
                f"traffic and shadow name {name} twice: versions differ in what they answer; leave "
                "one out"
            )
    return sets


def version_name(model_set: ModelSet, served: Precision) -> str:
    """Return NAME@FINGERPRINT."""
    return f"{model_set.name}@{model_set.fingerprint(served)}"


def check_fits(main: ModelSet, other: ModelSet) -> None:
    """Raise :class:`ConfigError` unless both have the same name, task and classes."""
    if main.name != other.name:
        raise ConfigError(
            f"traffic splits requests between versions of one set, and {main.name} and "
            f"{other.name} are two sets: serve several sets with model_sets"
        )
    if main.manifest.task != other.manifest.task:
        raise ConfigError(
            f"versions of {main.name} have the tasks {main.manifest.task} and "
            f"{other.manifest.task}: clients would get answers of two kinds"
        )
    what, ours, theirs = _classes(main, other)
    if ours == theirs:
        return
    if sorted(ours) == sorted(theirs):
        if twice := _some([name for name in dict.fromkeys(ours) if ours.count(name) > 1]):
            raise ConfigError(
                f"{other.folder} has the {what} of {main.folder} in another order, and several "
                f"classes are called {twice}: give both sets class ids (tandem models add "
                "--class-ids), each its own"
            )
        return
    missing, new = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    raise ConfigError(
        f"{other.folder} has other {what} than {main.folder}: {_some(missing) or 'none'} are "
        f"missing, {_some(new) or 'none'} are new; make the version with the same classes (their "
        "order is free), or serve it as a set of its own (model_sets)"
    )


def class_places(reference: ModelSet, version: ModelSet) -> list[int] | None:
    """Return the index in ``version`` of each class of ``reference``; None if they are equal.

    Both fit (:func:`check_fits`).
    """
    _, ours, theirs = _classes(reference, version)
    if ours == theirs:
        return None
    place_of = {name: place for place, name in enumerate(theirs)}
    return [place_of[name] for name in ours]


def _classes(main: ModelSet, other: ModelSet) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the classes of both in order: their ids if both sets have ids, else their labels."""
    if main.class_ids is not None and other.class_ids is not None:
        return "class ids", main.class_ids, other.class_ids
    return "labels", main.labels, other.labels


def _some(names: list[str]) -> str:
    text = ", ".join(names[:3])
    return f"{text} and {len(names) - 3} more" if len(names) > 3 else text


def first_split(settings: Settings, versions: list[ModelSet]) -> Split:
    """Return the split that the settings ask for; ``versions`` are from :func:`served_versions`."""
    of_settings = [own.model_set for own in settings.of_each_version()]
    names = [version_name(model_set, settings.served_precision) for model_set in versions]
    shares = dict(zip(names, _shares(settings), strict=True))
    shadow = None if settings.shadow is None else names[of_settings.index(settings.shadow)]
    return Split(shares, shadow)


def refused_by_gate(model_set: ModelSet, settings: Settings) -> str | None:
    """Return why a version must not answer: its INT8 lost too much; None if it may."""
    try:
        check_accuracy(model_set, settings)
    except UnverifiedError as error:
        return error.message
    return None
