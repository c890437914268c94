"""Refuses to serve a model set: INT8 that lost too much, or settings that its task excludes."""

from app.errors import ConfigError, UnverifiedError
from app.settings import Settings
from models.ledger import Verdict, judge
from models.manifest import Manifest
from models.model_set import ModelSet


def check_accuracy(model_set: ModelSet, settings: Settings) -> Verdict:
    """Return what the set's accuracy record says of it.

    Raises:
        UnverifiedError: INT8 lost more than ``max_drop``, beyond chance, and ``allow_unverified``
            is off.

    """
    verdict = judge(model_set.manifest, settings.served_precision, model_set.argument)
    if verdict.status == "dropped" and not settings.allow_unverified:
        raise UnverifiedError(verdict.message)
    return verdict


def check_task(settings: Settings, manifest: Manifest) -> None:
    """Check the settings against the set's task.

    Raises:
        ConfigError: a cascade of a multi-label set. Its margin is how far the best two of classes
            that exclude each other are apart; scores of several classes may be high together.

    """
    if manifest.task == "multi_label" and settings.cascade_margin is not None:
        raise ConfigError(
            f"cascade_margin is {settings.cascade_margin:g}, and {manifest.name} is multi-label: "
            "the margin is between the best two of classes that exclude each other, and these do "
            "not; leave it out"
        )
