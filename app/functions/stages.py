"""The graph's stages for the operator's own functions: ``preprocess`` and ``combine``."""

import asyncio
from collections.abc import Mapping
from functools import partial

from app.functions.answers import as_pixels, as_rows
from app.functions.calling import FunctionCalls
from app.functions.loading import load_function
from app.functions.trial import read_only, scaled, try_combine, try_preprocess
from app.settings import Settings
from models.ensemble import Probabilities
from models.image_inputs import ImageInputs
from models.manifest import Manifest
from models.runtime import Pixels


class OwnPreprocess:
    """The setting ``preprocess``: makes the members' views of each image."""

    def __init__(self, calls: FunctionCalls, num_views: int, inputs: ImageInputs) -> None:
        self.calls, self.num_views, self._inputs = calls, num_views, inputs

    @classmethod
    def of(cls, settings: Settings, manifest: Manifest) -> "OwnPreprocess | None":
        """Load and try the function; None without one; raises :class:`ConfigError` if it fails."""
        function = load_function(settings.preprocess, "preprocess")
        if function is None:
            return None
        num_views = try_preprocess(
            function, manifest, settings.max_files, settings.max_queued_images
        )
        calls = FunctionCalls(function, settings.decode_threads)
        return cls(calls, num_views, manifest.inputs)

    async def views(self, images: Pixels) -> Pixels:
        """Return the views of uint8 (N, H, W, 3): (N, V, H, W, 3), or (N, H, W, 3) with one view.

        If members have different inputs, (N, B), the function is called for each distinct input,
        and the views are (N, V, B) or (N, B).
        """
        parts = self._inputs.split(images)
        calls = [self.calls.call(partial(self._grouped, p.shape), read_only(p)) for p in parts]
        return self._inputs.joined(await asyncio.gather(*calls))

    def _grouped(self, shape: tuple[int, ...], answer: object) -> Pixels:
        """Check the result, and group the views of each image."""
        pixels, num_views = as_pixels(answer, shape, self.num_views)
        if num_views == 1:
            return pixels
        by_view = pixels.reshape(num_views, *shape)  # (V, N, H, W, 3)
        return by_view.swapaxes(0, 1).copy()


class OwnCombine:
    """The setting ``combine``: computes the ensemble's rows, in place of the average."""

    def __init__(
        self, calls: FunctionCalls, weights: Mapping[str, float], *, is_multi_label: bool = False
    ) -> None:
        self.calls, self._weights, self._is_multi_label = calls, weights, is_multi_label

    @classmethod
    def of(cls, settings: Settings, manifest: Manifest) -> "OwnCombine | None":
        """Load and try the function; None without one; raises :class:`ConfigError` if it fails."""
        function = load_function(settings.combine, "combine")
        if function is None:
            return None
        try_combine(function, manifest, settings.answer_policy)
        calls = FunctionCalls(function, settings.decode_threads)
        return cls(calls, manifest.weights, is_multi_label=manifest.is_multi_label)

    async def rows(self, members: Mapping[str, Probabilities]) -> Probabilities:
        """Return the ensemble's float32 (N, C) from the rows of the members that answered."""
        names = [name for name in self._weights if name in members]
        read = {name: read_only(members[name]) for name in names}
        num_images, num_classes = read[names[0]].shape
        shape = (num_images, num_classes)
        check = partial(as_rows, shape=shape, is_multi_label=self._is_multi_label)
        return await self.calls.call(check, read, scaled(self._weights, names))
