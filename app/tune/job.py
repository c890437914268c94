"""The input of a tuning run: configuration, settings and photos."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from app.bench.load import drawn_photos, photos_in
from app.errors import ConfigError
from app.graph.set_checks import check_accuracy
from app.launch.config import ServeConfig, default_config
from app.settings import Settings
from app.tune.config import check_place
from models.errors import ImageError
from models.model_set import ModelSet

err = Console(stderr=True, soft_wrap=True, highlight=False)
MAX_PHOTOS = 256  # of a folder, evenly taken; every replica holds them


@dataclass(frozen=True)
class Job:
    """What is tuned, and with which photos."""

    config: ServeConfig
    bodies: list[bytes]
    told: str  # the photos in words


def prepare(config: Path | None, model_set: str | None, images: Path | None) -> Job:
    """Read the configuration, the set and the photos; every mistake is found here."""
    path = config or default_config()
    served = ServeConfig.read(path).with_overrides(model_set=model_set)
    settings = served.settings
    check_place(settings, path)
    loaded = settings.load_set()
    check_accuracy(loaded, settings)
    for member in loaded.manifest.members:
        loaded.network_path(member.name, settings.served_precision)
    if images is None:
        drawn = drawn_photos()
        return Job(served, drawn, f"{len(drawn)} drawn photos of 500 x 375")
    bodies = good_photos(photos_in(images), loaded, settings)
    return Job(served, bodies, f"{len(bodies)} photos of {images}")


def good_photos(bodies: list[bytes], model_set: ModelSet, settings: Settings) -> list[bytes]:
    """Return some of the photos, without those that the service would refuse."""
    inputs, found, why = model_set.manifest.inputs, [], ""
    some = bodies[:: -(-len(bodies) // MAX_PHOTOS)]
    for body in some:
        try:
            checked = inputs.check(
                body, max_pixels=settings.max_pixels, max_full_pixels=settings.max_full_pixels
            )
            inputs.decode(body, checked)
        except ImageError as error:
            why = error.message
        else:
            found.append(body)
    if not found:
        raise ConfigError(f"none of {len(some)} photos can be classified, the last: {why}")
    if len(found) < len(some):
        err.print(f"[yellow]left out {len(some) - len(found)} photos[/], the last: {escape(why)}")
    return found
