"""Runs the ensemble in INT8: all members averaged, with a cascade or on every image."""

from collections.abc import Sequence

import numpy as np

from calibration.ladder.engine import (
    INPUTS_NAME,
    SEED,
    SkippedError,
    has_labelled,
    random_pixels,
)
from calibration.ladder.measure import NetworkCall
from calibration.ladder.rung import RungOptions, RungTask
from models.ensemble import Probabilities, average, is_sure, tempered
from models.image_inputs import ImageInputs
from models.manifest import read_manifest
from models.model_set import ModelSet
from models.runtimes.load import load
from models.runtimes.options import Pixels, RuntimeOptions


class EnsembleNetwork:
    """The members compiled as for serving: fixed batch sizes, a stream per core.

    With a cascade the first member answers alone if its margin is at least ``cascade_margin``. How
    often it does depends on the images, so it is only measured with labelled ones.
    """

    def __init__(self, task: RungTask, options: RungOptions) -> None:
        self._margin = options.cascade_margin
        has_images = has_labelled(task.work)
        if self._margin is not None and not has_images:
            raise SkippedError("how many images a cascade answers alone depends on them: --images")
        manifest = read_manifest(task.network.model_set)
        model_set = ModelSet(task.network.model_set, manifest)
        sizes = tuple(sorted({*(2**n for n in range(options.batch.bit_length())), options.batch}))
        compiled = RuntimeOptions(
            num_threads=task.cores,
            num_streams=options.streams or task.cores,
            batch_sizes=sizes if self._margin is not None else (options.batch,),
            float_type=manifest.float_type,
        )
        self._weights = manifest.weights
        self._temperatures, self._temperature = manifest.temperatures, manifest.temperature
        self._networks = {
            name: load(model_set.network_path(name, "INT8"), compiled) for name in self._weights
        }
        self._first = next(iter(self._weights))
        self._num_asked = self._num_skipped = 0
        self._inputs = manifest.inputs
        self._batches = _batches(task, self._inputs, options.batch, has_images=has_images)
        self._num_callers = compiled.num_streams

    @property
    def calls(self) -> Sequence[NetworkCall]:
        return [self._caller(number) for number in range(self._num_callers)]

    @property
    def notes(self) -> tuple[str, ...]:
        if self._margin is None or not self._num_asked:
            return (f"{len(self._networks)} members for every image",)
        share = self._num_skipped / self._num_asked
        return (f"the first member alone answered {share:.0%} (cascade_margin {self._margin:g})",)

    def predict(self, pixels: Pixels) -> Probabilities:
        """Return the members' average for a batch of their inputs."""
        if self._margin is None:
            rows = {name: self._rows(name, pixels) for name in self._networks}
            return average(rows, self._weights, self._temperature)
        answer = self._rows(self._first, pixels)
        unsure = np.flatnonzero(~is_sure(answer, self._margin))
        self._num_asked += len(pixels)
        self._num_skipped += len(pixels) - len(unsure)
        if len(unsure):
            part = {self._first: answer[unsure]}
            others = (n for n in self._networks if n != self._first)
            part |= {name: self._rows(name, pixels[unsure]) for name in others}
            answer[unsure] = average(part, self._weights, self._temperature)
        return answer

    def _rows(self, name: str, images: Pixels) -> Probabilities:
        rows = self._networks[name].predict(self._inputs.of(name, images))
        return tempered(rows, self._temperatures[name])

    def _caller(self, number: int) -> NetworkCall:
        """Return a function that runs the batches in turn; each caller starts at another batch."""
        place = number

        def call() -> None:
            nonlocal place
            self.predict(self._batches[place % len(self._batches)])
            place += 1

        return call


def _batches(task: RungTask, inputs: ImageInputs, batch: int, *, has_images: bool) -> list[Pixels]:
    """Return whole batches of the labelled images, or of random ones if there are none."""
    if has_images:
        pixels: Pixels = np.load(task.work / INPUTS_NAME, allow_pickle=False)
        if len(pixels) >= batch:
            return [pixels[i : i + batch] for i in range(0, len(pixels) - batch + 1, batch)]
        return [np.resize(pixels, (batch, *pixels.shape[1:]))]
    return [
        inputs.joined([random_pixels(batch, rule.input_size, SEED + n) for rule in inputs.rules])
        for n in range(4)
    ]
