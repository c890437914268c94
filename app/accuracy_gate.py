"""Refuses to serve a model set whose INT8 networks lost more accuracy than it allows."""

from app.errors import UnverifiedError
from app.settings import Settings
from models.ledger import Verdict, judge
from models.manifest import Manifest


def check_accuracy(manifest: Manifest, settings: Settings) -> Verdict:
    """Return what the set's accuracy record says of it.

    Raises:
        UnverifiedError: INT8 lost more than ``max_drop``, beyond chance, and ``allow_unverified``
            is off.

    """
    verdict = judge(manifest, settings.precision)
    if verdict.status == "dropped" and not settings.allow_unverified:
        raise UnverifiedError(verdict.message)
    return verdict
