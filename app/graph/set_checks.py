"""Checks model sets before they are served: their names, INT8's accuracy, and the settings."""

from collections import Counter
from collections.abc import Iterable

from app.errors import ConfigError, UnverifiedError
from app.settings import Settings
from models.ledger import Verdict, judge
from models.manifest import Manifest
from models.model_set import ModelSet


def served_sets(settings: Settings) -> list[ModelSet]:
    """Load the sets that the settings name, the default first.

    Raises:
        ModelSetError: a set cannot be loaded.
        ConfigError: two sets, or a set and a member of another, have the same name; or
            ``set_weights`` names a set that is not served.

    """
    sets = [own.load_set() for own in settings.of_each_set()]
    check_names(sets)
    names = [model_set.name for model_set in sets]
    if unknown := next((name for name in settings.set_weights or {} if name not in names), None):
        raise ConfigError(
            f"set_weights names {unknown!r}, which is not served; the served sets are "
            f"{', '.join(names)}"
        )
    return sets


def check_names(sets: Iterable[ModelSet]) -> None:
    """Raise :class:`ConfigError` if two sets, or a set and another's member, share a name."""
    counts = Counter(name for model_set in sets for name in _names_of(model_set))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"model_sets has {twice[0]} twice, so that a request could not choose between them; "
            "leave one out, or change the name in its manifest"
        )


def _names_of(model_set: ModelSet) -> Iterable[str]:
    """Yield the names that requests use for the set and for its single members."""
    yield model_set.name
    yield from (f"{model_set.name}.{member.name}" for member in model_set.manifest.members)


def check_accuracy(model_set: ModelSet, settings: Settings) -> Verdict:
    """Return the verdict of the set's accuracy record.

    Raises:
        UnverifiedError: INT8 lost more than ``max_drop``, beyond chance, and ``allow_unverified``
            is off.

    """
    verdict = judge(model_set.manifest, settings.served_precision, model_set.argument)
    if verdict.status == "dropped" and not settings.allow_unverified:
        raise UnverifiedError(verdict.message)
    return verdict


def check_task(cascade_margin: float | None, manifest: Manifest) -> None:
    """Check that a cascade fits the set's task.

    Raises:
        ConfigError: a cascade is set for a multi-label set. The margin is the distance of the two
            highest probabilities; in a multi-label set several classes may have high scores.

    """
    if manifest.is_multi_label and cascade_margin is not None:
        raise ConfigError(
            f"cascade_margin is {cascade_margin:g}, and {manifest.name} is multi-label: "
            "the margin needs classes that exclude each other; leave it out"
        )
