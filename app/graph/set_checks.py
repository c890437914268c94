"""Checks model sets before they are served: their names, INT8's accuracy, and the settings.

It also decides ``precision: auto``: INT8 where this CPU computes it right, else the float networks.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from app.errors import ConfigError, UnverifiedError
from app.settings import Settings
from models import golden
from models.errors import ModelSetError
from models.ledger import Verdict, judge
from models.machine import available_cpus
from models.model_set import ModelSet
from models.network import RuntimeOptions, load


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
    counts: Counter[str] = Counter()  # of the names that requests use
    for model_set in sets:
        members = (f"{model_set.name}.{member.name}" for member in model_set.manifest.members)
        counts.update((model_set.name, *members))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(
            f"model_sets has {twice[0]} twice, so that a request could not choose between them; "
            "leave one out, or change the name in its manifest"
        )


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


def refused_by_gate(model_set: ModelSet, settings: Settings) -> str | None:
    """Return why a version must not answer: its INT8 lost too much; None if it may."""
    try:
        check_accuracy(model_set, settings)
    except UnverifiedError as error:
        return error.message
    return None


def check_plan(settings: Settings, model_set: ModelSet) -> None:
    """Check that a set has the fast plan that the settings ask for.

    Raises:
        ConfigError: the set has none that was made for its networks.
    """
    wanted = "plan" if settings.plan == "fast" else "when_full"
    if settings.plan != "fast" and settings.when_full != "fast":
        return
    precision = settings.served_precision
    problem = model_set.manifest.plan_problem(precision, model_set.argument)
    if problem is not None:
        raise ConfigError(f"{wanted} is fast, and {problem}; or leave {wanted} out")


def decided(settings: Settings, *model_sets: ModelSet) -> tuple[Settings, str | None]:
    """Return the settings with one precision for all sets, and the reason if it is not INT8.

    Every INT8 network is compiled and run here; each replica still checks what it serves.

    Raises:
        ModelSetError: a network is missing or altered, or there are no float networks to use.
    """
    if settings.precision != "auto":
        return settings, None
    size = settings.batch_sizes[-1]
    problems = (_problem(model_set, size, settings.compile_cache) for model_set in model_sets)
    if (problem := next(filter(None, problems), None)) is None:
        return settings.model_copy(update={"precision": "INT8"}), None
    try:
        for model_set in model_sets:
            for member in model_set.manifest.members:
                model_set.network_path(member.name, "FP16")
    except ModelSetError as error:
        raise ModelSetError(
            f"precision auto: {problem} And there is no FP16 to take: {error.message}"
        ) from error
    warning = f"precision auto: FP16 is served, not INT8: {problem}"
    return settings.model_copy(update={"precision": "FP16"}), warning


def _problem(model_set: ModelSet, batch_size: int, cache: Path | None) -> str | None:
    """Return why INT8 cannot be served on this machine."""
    options = RuntimeOptions(
        num_threads=available_cpus(),
        batch_sizes=(batch_size,),
        cache_dir=cache,
        float_type=model_set.manifest.float_type,
    )
    for member in model_set.manifest.members:
        precision = member.precision_of("INT8")
        if precision not in member.networks:
            return f"{member.name} has no INT8 network."
        if (expected := model_set.golden) is None:
            continue  # nothing to compare with; replicas warn of it
        network = load(model_set.network_path(member.name, precision), options)
        try:
            golden.check(expected, member.name, precision, network)
        except golden.GoldenMismatchError as error:
            return f"{error.message}."
    return None
