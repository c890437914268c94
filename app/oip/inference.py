"""Answers inference requests through the application's service, under its limits."""

from dataclasses import dataclass, replace
from typing import Protocol

from app.errors import BadTensorError, TooManyFilesError
from app.graph.observer import RequestObserver
from app.graph.parameters import checked_threshold, checked_top_k
from app.graph.request import RequestAnswers, RequestBody, RequestOptions, TensorRequest
from app.graph.service import EnsembleService
from app.messages import Fault
from app.oip.answer import InferAnswer, answer_of, check_outputs_fit
from app.oip.documents import AllStatistics, ModelStatistics
from app.oip.models import IMAGE, Models, ServedModel
from app.oip.regions import Regions
from app.oip.repository import Repository, SetLoader
from app.oip.request import InferRequest
from app.oip.shared_memory import loaded, placed
from app.oip.tensors import bytes_elements, uint8_array
from app.queueing.byte_budget import Share
from app.responses import Classified


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request that was read, and the model that it names."""

    model: ServedModel
    request: InferRequest
    regions: Regions | None = None  # if the request uses regions


class InferReader(Protocol):
    """Reads an inference request within its interface's limits, after admission."""

    async def read(self, share: Share) -> ModelRequest:
        """Return the request; the bytes that arrive count in ``share``."""


class Inference:
    """The protocol's inference, for HTTP and gRPC alike."""

    def __init__(
        self,
        service: EnsembleService,
        regions: Regions | None = None,  # None: shared memory is off
        loader: SetLoader | None = None,
    ) -> None:
        self.service = service
        self._sets = self._served()
        self._models = self._models_of_sets()
        self._statistics: dict[tuple[str, str], ModelStatistics] = {}  # by name and version
        self.regions = regions
        self.repository = Repository(service, loader)

    @property
    def models(self) -> Models:
        """The models of the sets served at present, in their main versions."""
        if self._sets != (now := self._served()):
            self._sets = now
            self._models = self._models_of_sets()
            kept = [self._of(model) for model in self._models.all]
            self._statistics = {(each.name, each.version): each for each in kept}
        return self._models

    def statistics(self, *models: ServedModel) -> AllStatistics:
        """Return the statistics of ``models``; without any, of all that are served at present."""
        return AllStatistics([self._of(model) for model in models or self.models.all])

    def _of(self, model: ServedModel) -> ModelStatistics:
        new = ModelStatistics(model.name, model.version)
        return self._statistics.setdefault((model.name, model.version), new)

    def _served(self) -> list[tuple[EnsembleService, str]]:
        return [(of_set, of_set.version) for of_set in self.service.sets.values()]

    def _models_of_sets(self) -> Models:
        return Models(*(of_set.served_models() for of_set, _ in self._sets))

    async def answer(
        self, reader: InferReader, options: RequestOptions, observer: RequestObserver
    ) -> InferAnswer | Fault:
        """Return the answer, or the fault of the first bad image; raise if the request fails."""
        limits = self.service.settings
        body = _InferBody(reader, limits.max_files, limits.max_body_bytes)
        images: list[Classified] = []
        is_answered = False
        try:
            images, fault = _images_of(await self.service.answer(body, options, observer))
            if fault is not None:
                return fault
            asked = body.asked
            assert asked is not None
            answer = placed(answer_of(asked.request, asked.model, images), asked.regions)
            is_answered = True
            return answer
        finally:
            if body.asked is not None:
                statistics = self._of(body.asked.model)
                if is_answered:
                    statistics.succeeded(observer.elapsed_ms(), images)
                else:
                    statistics.failed(observer.elapsed_ms())


class _InferBody:
    """Gives the service the parts of an inference request that it reads, and keeps the request."""

    def __init__(self, reader: InferReader, max_files: int, max_bytes: int) -> None:
        self._reader, self._max_files, self._max_bytes = reader, max_files, max_bytes
        self.asked: ModelRequest | None = None  # without its inputs, which the graph gets

    async def read(self, share: Share) -> RequestBody:
        """Check the request and return its images; see :class:`app.graph.request.BodyReader`."""
        asked = await self._reader.read(share)
        request, model = asked.request, asked.model
        tensor = model.input_of(request)
        model.check_outputs(request)
        if request.top_k is not None:
            checked_top_k(request.top_k, len(model.labels))
        checked_threshold(request.threshold, is_multi_label=model.threshold is not None)
        count, most = tensor.shape[0], self._max_files
        if not count:
            raise BadTensorError(f"input {tensor.name} has no image; send one or more")
        if count > most:
            raise TooManyFilesError(
                f"input {tensor.name} has {count} images, the limit is {most}; "
                "send them in several requests"
            )
        check_outputs_fit(request, model, count, asked.regions)
        tensor = await loaded(tensor, asked.regions, self._max_bytes, share)
        is_files = tensor.name == IMAGE
        version = model.version if model.is_asked_by_version else None
        pixels = None if is_files else uint8_array(tensor)
        tensors = TensorRequest(pixels, model.member, version, model.version)
        files = bytes_elements(tensor) if is_files else []
        self.asked = replace(asked, request=replace(request, inputs=()))
        return RequestBody(
            files, 1, request.timeout_s, request.priority, tensors, model_set=model.model_set
        )


def _images_of(
    answers: RequestAnswers,
) -> tuple[list[Classified], Fault | None]:
    """Return the answers, or the first fault, which names its image."""
    images: list[Classified] = []
    for number, answer in enumerate(answers):
        if isinstance(answer, Fault):
            message = f"image {number} of {len(answers)} (counted from 0): {answer.message}"
            return [], Fault(answer.status, answer.code, message)
        images.append(answer)
    return images, None
