"""Refuses settings that have no meaning for the task of a model set."""

from app.errors import ConfigError
from app.settings import Settings
from models.manifest import Manifest


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
