"""The input of a tuning run: configuration, settings and photos."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from app.bench.load import drawn_photos, photos_in
from app.errors import ConfigError
from app.graph.set_checks import check_accuracy
from app.launch.config import ServeConfig, default_config
from app.precision import decided
from app.settings import Settings
from app.tune.config import check_place
from models.errors import ImageError
from models.image_inputs import ImageInputs

err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
MAX_PHOTOS = 256  # of a folder, sampled evenly; every replica holds them


@dataclass(frozen=True)
class Job:
    """The set and photos to tune with."""

    config: ServeConfig
    settings: Settings  # the configuration's, with ``precision: auto`` decided
    bodies: list[bytes]
    origin: str  # a description of the photos


def prepare(config: Path | None, model_set: str | None, images: Path | None) -> Job:
    """Read the configuration, the set and the photos; raises for every mistake in them."""
    path = config or default_config()
    served = ServeConfig.read(path).with_overrides(model_set=model_set)
    settings = served.settings
    if settings.has_several_sets:
        raise ConfigError("tune measures one set, and several are asked for; give --model-set NAME")
    check_place(settings, path)
    loaded = settings.load_set()
    settings, warning = decided(settings, loaded)
    if warning is not None:
        err.print(f"[yellow]{escape(warning)}[/]")
    check_accuracy(loaded, settings)
    for member in loaded.manifest.members:
        loaded.network_path(member.name, settings.served_precision)
    if images is None:
        drawn = drawn_photos()
        return Job(served, settings, drawn, f"{len(drawn)} drawn photos of 500 x 375")
    bodies = good_photos(
        photos_in(images), loaded.manifest.inputs, settings.max_pixels, settings.max_full_pixels
    )
    return Job(served, settings, bodies, f"{len(bodies)} photos of {images}")


def good_photos(
    bodies: list[bytes], inputs: ImageInputs, max_pixels: int, max_full_pixels: int
) -> list[bytes]:
    """Return photos that the service would accept, at most ``MAX_PHOTOS``."""
    photos, why = [], ""
    some = bodies[:: -(-len(bodies) // MAX_PHOTOS)]
    for body in some:
        try:
            checked = inputs.check(body, max_pixels=max_pixels, max_full_pixels=max_full_pixels)
            inputs.decode(body, checked)
        except ImageError as error:
            why = error.message
        else:
            photos.append(body)
    if not photos:
        raise ConfigError(f"none of {len(some)} photos can be classified, the last: {why}")
    if len(photos) < len(some):
        err.print(f"[yellow]left out {len(some) - len(photos)} photos[/], the last: {escape(why)}")
    return photos
