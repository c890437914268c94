"""Refuses to serve a model set whose INT8 networks lost more accuracy than it allows."""

from app.errors import UnverifiedError
from app.settings import Settings
from models.ledger import Verdict, judge
from models.model_set import ModelSet


def check_accuracy(model_set: ModelSet, settings: Settings) -> Verdict:
    """Return what the set's accuracy record says of it.

    Raises:
        UnverifiedError: INT8 lost more than ``max_drop``, beyond chance, and ``allow_unverified``
            is off.

    """
    verdict = judge(model_set.manifest, settings.precision, model_set.argument)
    if verdict.status == "dropped" and not settings.allow_unverified:
        raise UnverifiedError(verdict.message)
    return verdict
