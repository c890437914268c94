"""Answers inference requests through the application's service, and loads and unloads sets by name.

Also Triton's model repository extension: the index, and loading and unloading of model sets.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from app.answers import Classified, Fault
from app.environment import is_on_loopback
from app.errors import (
    BadParameterError,
    BadTensorError,
    BodyTooLargeError,
    NotLocalError,
    SetStateError,
    TooManyFilesError,
)
from app.graph.request import (
    DEFAULT_URGENCY,
    RequestAnswers,
    RequestBody,
    RequestOptions,
    TensorRequest,
    checked_threshold,
    checked_top_k,
)
from app.graph.service import EnsembleService
from app.oip.bodies import InferAnswer, OutputTensor, answer_of, check_outputs_fit
from app.oip.models import (
    IMAGE,
    AllStatistics,
    ConfiguredInput,
    ConfiguredOutput,
    IndexEntry,
    ModelConfiguration,
    Models,
    ModelStatistics,
    ServedModel,
)
from app.oip.regions import Regions
from app.oip.tensors import (
    MAX_URGENCY,
    Bytes,
    InferRequest,
    Tensor,
    bytes_elements,
    shown,
    uint8_array,
)
from app.queueing.admission import Share
from app.telemetry.metrics import RequestObserver

CONFIGURED_TYPES = {"BYTES": "TYPE_STRING", "UINT8": "TYPE_UINT8", "FP32": "TYPE_FP32"}
PRIORITIES = {"priority_levels": MAX_URGENCY + 1, "default_priority_level": DEFAULT_URGENCY + 1}
LONG_BYTES = 2**20  # longer reads and conversions run on a thread, to keep the event loop free


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request that was read, and the model that it names."""

    model: ServedModel
    request: InferRequest
    regions: Regions | None = None  # if the request uses regions


class SetLoader(Protocol):
    """Loads and unloads the sets of a Gateway, as :mod:`app.serve.sets` does."""

    def unloaded(self) -> Mapping[str, str]:
        """Return the state of each set that is known and not served."""

    async def load(self, name: str) -> None:
        """Load a set, or the version of it that its folder has now."""

    async def unload(self, name: str) -> None:
        """Unload a set."""


class Inference:
    """The protocol's inference, for HTTP and gRPC alike."""

    def __init__(
        self,
        service: EnsembleService,
        regions: Regions | None = None,  # None: shared memory is off
        loader: SetLoader | None = None,
    ) -> None:
        self.service = service
        self._sets: list[tuple[EnsembleService, str]] = []  # with the versions that they serve
        self._statistics: dict[tuple[str, str], ModelStatistics] = {}  # by name and version
        self.regions, self._converting = regions, asyncio.Lock()
        self.repository = Repository(service, loader)

    @property
    def models(self) -> Models:
        """The models of the sets served at present, in their main versions."""
        if self._sets != (now := [(own, own.version) for own in self.service.sets.values()]):
            self._sets = now
            self._models = Models(*(own.served_models() for own, _ in now))
            kept = [self.statistics_of(model) for model in self._models.all]
            self._statistics = {(each.name, each.version): each for each in kept}
        return self._models

    def statistics(self, *models: ServedModel) -> AllStatistics:
        """Return the statistics of ``models``; without any, of all that are served at present."""
        return AllStatistics([self.statistics_of(model) for model in models or self.models.all])

    def statistics_of(self, model: ServedModel) -> ModelStatistics:
        """Return the statistics that a model's requests are counted in."""
        new = ModelStatistics(model.name, model.version)
        return self._statistics.setdefault((model.name, model.version), new)

    def configuration(self, model: ServedModel) -> ModelConfiguration:
        """Return a model's configuration as Triton has it, for perf_analyzer and the like.

        It has no dimension of images, and a tensor of one value an image has one dimension.
        """
        described, settings = model.metadata(), self.service.settings
        inputs, outputs = (
            [
                (each.name, CONFIGURED_TYPES[each.datatype], each.shape[1:] or [1])
                for each in tensors
            ]
            for tensors in (described.inputs, described.outputs)
        )
        return ModelConfiguration(
            model.name,
            settings.max_files,
            [ConfiguredInput(*tensor) for tensor in inputs],
            [ConfiguredOutput(*tensor) for tensor in outputs],
            response_cache={"enable": settings.cache != "none"},
            dynamic_batching=PRIORITIES,
        )

    async def exchange(
        self,
        options: RequestOptions,
        observer: RequestObserver,
        read: Callable[[Share], Awaitable[ModelRequest]],
    ) -> InferAnswer | Fault:
        """Answer a request; a fault is that of its first bad image.

        Args:
            options: what the headers or the metadata ask for.
            observer: made when the request arrived.
            read: reads the request; it counts the bytes in the share.

        Raises:
            TandemError: the request fails as a whole, as in :meth:`EnsembleService.admit`.
        """
        asked: ModelRequest | None = None  # without its inputs, which the graph gets
        images: list[Classified] | None = None
        try:
            with self.service.admit(options, observer) as admitted:
                async with admitted.arriving():
                    request = await read(admitted.share)
                    bodies = [await self._body_of(request, admitted.share)]
                    asked = replace(request, request=replace(request.request, inputs=()))
                    del request
                answers = await admitted.answer(bodies.pop())  # its pixels go with the graph's
                answered, fault = _images_of(answers)
                if fault is not None:
                    return fault
                answer = placed(answer_of(asked.request, asked.model, answered), asked.regions)
                images = answered
            return answer
        finally:
            if asked is not None:
                statistics = self.statistics_of(asked.model)
                if images is None:
                    statistics.failed(observer.elapsed_ms())
                else:
                    statistics.succeeded(observer.elapsed_ms(), images)

    async def _body_of(self, asked: ModelRequest, share: Share) -> RequestBody:
        """Check a request and take its images; raise :class:`TandemError` if it is refused."""
        request, model = asked.request, asked.model
        limits = self.service.settings
        tensor = model.input_of(request)
        model.check_outputs(request)
        if request.top_k is not None:
            checked_top_k(request.top_k, len(model.labels))
        checked_threshold(request.threshold, is_multi_label=model.threshold is not None)
        count, most = tensor.shape[0], limits.max_files
        if not count:
            raise BadTensorError(f"input {tensor.name} has no image; send one or more")
        if count > most:
            raise TooManyFilesError(
                f"input {tensor.name} has {count} images, the limit is {most}; "
                "send them in several requests"
            )
        check_outputs_fit(request, model, count, asked.regions)
        tensor = await loaded(tensor, asked.regions, limits.max_body_bytes, share)
        is_files = tensor.name == IMAGE
        version = model.version if model.is_asked_by_version else None
        pixels = None if is_files else await self._pixels_of(tensor)
        return RequestBody(
            bytes_elements(tensor) if is_files else [],
            1,
            request.timeout_s,
            request.priority,
            TensorRequest(pixels, model.member, version, model.version),
            model_set=model.model_set,
            plan=request.plan,
            embedding=model.embedding_of(request),
        )

    async def _pixels_of(self, tensor: Tensor) -> Bytes:
        """Return a tensor's pixels, (N, H, W, 3); long ones are converted in turn, on a thread."""
        if len(tensor.packed or ()) <= LONG_BYTES:
            pixels = uint8_array(tensor)
        else:
            async with self._converting:
                pixels = await asyncio.to_thread(uint8_array, tensor)
        return pixels.repeat(3, axis=3) if pixels.shape[3] == 1 else pixels  # of grey


def _images_of(answers: RequestAnswers) -> tuple[list[Classified], Fault | None]:
    """Return the answers, or the first fault, which names its image."""
    images: list[Classified] = []
    for number, answer in enumerate(answers):
        if isinstance(answer, Fault):
            message = f"image {number} of {len(answers)} (counted from 0): {answer.message}"
            return [], Fault(answer.status, answer.code, message)
        images.append(answer)
    return images, None


async def loaded(tensor: Tensor, regions: Regions | None, max_bytes: int, share: Share) -> Tensor:
    """Return a tensor with its contents, read from its region if it has one.

    The bytes count in ``share`` like a body's, before memory is allocated for them.

    Raises:
        BodyTooLargeError: the tensor is longer than a body may be; nothing was read.
        UnknownRegionError, BadRegionError: the region is not as it was registered.
        OverloadedError: the bodies of all requests together are too large.
    """
    if tensor.region is None or regions is None:
        return tensor
    if tensor.region.byte_size > max_bytes:
        raise BodyTooLargeError(
            f"input {shown(tensor.name)} has {tensor.region.byte_size} bytes of shared memory, the "
            f"limit is {max_bytes}; send fewer images per request"
        )
    share.grow(tensor.region.byte_size)
    if tensor.region.byte_size > LONG_BYTES:
        raw = await asyncio.to_thread(regions.read, tensor.region)
    else:
        raw = regions.read(tensor.region)
    return replace(tensor, raw=raw, region=None)


def placed(answer: InferAnswer, regions: Regions | None) -> InferAnswer:
    """Write the outputs that have a region; return the answer with their places.

    Raises:
        UnknownRegionError, BadRegionError: a region is not as it was registered, or too small.
    """
    if regions is None:
        return answer

    def place(output: OutputTensor) -> OutputTensor:
        if output.region is None:
            return output
        return replace(output, region=regions.write(output.region, output.packed()))

    return replace(answer, outputs=tuple(map(place, answer.outputs)))


READY = "READY"
NOT_HERE = "unloaded; POST /v2/repository/models/NAME/load loads it"
ON_DEMAND = "not in memory; the next request has it loaded"
DEPENDENTS = "unload_dependents"  # ignored: a set's members always go with it


class Repository:
    """Answers the extension's calls; without a ``loader`` no set can be loaded or unloaded."""

    def __init__(self, service: EnsembleService, loader: SetLoader | None = None) -> None:
        self._service, self._loader = service, loader

    def index(self, models: Models, *, only_ready: bool = False) -> list[IndexEntry]:
        """List the models; those of unloaded sets come last."""
        entries = self._entries(models)
        return [entry for entry in entries if not only_ready or entry.state == READY]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Load a set by its name.

        Raises:
            NotLocalError: the service has no keys, and the caller may be on another machine.
            BadParameterError: a parameter would change the set, which is loaded as its folder is.
            TandemError: see :meth:`app.serve.sets.ServedSets.load`.
        """
        loader = self._checked_loader()
        if parameters:
            raise BadParameterError(
                f"the parameter {shown(next(iter(parameters)))} is not taken: a set is served as "
                "its folder has it"
            )
        await loader.load(name)

    async def unload(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Unload a set; raises as :meth:`load` does."""
        loader = self._checked_loader()
        if others := parameters.keys() - {DEPENDENTS}:
            raise BadParameterError(
                f"the parameter {shown(min(others))} is not taken; {DEPENDENTS} is, and changes "
                "nothing"
            )
        await loader.unload(name)

    def _checked_loader(self) -> SetLoader:
        if not self._service.keys and not is_on_loopback():
            raise NotLocalError(
                "without keys only programs on the service's own machine may load and unload sets, "
                "where tandem serve listens on loopback: give the service keys (api_keys_file)"
            )
        if self._loader is None:
            raise SetStateError("this service's sets stay as they are")
        return self._loader

    def _entries(self, models: Models) -> Iterator[IndexEntry]:
        for model in models.all:
            service = self._service.of_set(model.model_set)
            if (problem := service.problem) is not None:
                yield IndexEntry(model.name, model.version, "UNAVAILABLE", problem.message)
            else:
                reason = "" if service.is_loaded else ON_DEMAND
                yield IndexEntry(model.name, model.version, READY, reason)
        for name, state in (self._loader.unloaded() if self._loader else {}).items():
            yield IndexEntry(name, "", state, NOT_HERE if state == "UNAVAILABLE" else "")
