"""Decides ``precision: auto``: INT8 where this CPU computes it right, else the float networks."""

from pathlib import Path

from app.settings import Settings
from models import golden
from models.cpus import available_cpus
from models.errors import ModelSetError
from models.model_set import ModelSet
from models.runtimes.load import load
from models.runtimes.options import RuntimeOptions


def decided(settings: Settings, *model_sets: ModelSet) -> tuple[Settings, str | None]:
    """Return the settings with one precision for all; why it is not INT8, or None.

    Every INT8 network is compiled and run here; each replica still checks what it serves.

    Raises:
        ModelSetError: a network is missing or altered, or no float ones are there to take.

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
