"""Takes a request in, the same for HTTP and gRPC: parameters, admission, bytes, time, lane."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from app.caching.response_cache import CacheUse, cache_use_of
from app.graph.parameters import checked_threshold, checked_top_k, lane_of
from app.graph.request import ClassifyRequest, RequestAnswers, TensorRequest, num_images_of
from app.graph.timeline import Timeline
from app.metrics.meter import meter
from app.metrics.table import REFUSED_BEFORE
from app.queueing.admission import Admission
from app.queueing.byte_budget import ByteBudget, Share
from app.settings import Settings


class RequestBody(NamedTuple):
    """What a request's body holds: the images, and what else the protocol has there."""

    files: list[bytes]
    top_k: int | None = None
    timeout_s: float | None = None  # from the request's arrival; can only shorten it
    priority: str | None = None  # goes before the Priority header
    tensors: TensorRequest | None = None
    threshold: float | None = None


# Reads a request's body under the interface's limits; what arrives counts in the share.
ReadFiles = Callable[[Share], Awaitable[RequestBody]]


class RequestOptions(NamedTuple):
    """What a client asks for besides its images; None: not given."""

    request_id: str
    top_k: int | None = None
    timeout_s: float | None = None  # can only shorten the settings'
    priority: str | None = None  # the Priority header (RFC 9218)
    refused_before: int = 0  # requests that HAProxy has refused since it last said so
    cache_control: str | None = None  # the header, where there is a cache
    threshold: float | None = None  # of a multi-label set's scores


class Intake:
    """Admits requests, reads their files under the limits, and hands them to ``classify``."""

    def __init__(
        self,
        settings: Settings,
        num_classes: int,
        classify: Callable[[ClassifyRequest], Awaitable[RequestAnswers]],
        admission: Admission,
        byte_budget: ByteBudget,
        answer_timeout_s: float,
        *,
        is_multi_label: bool = False,
    ) -> None:
        self._num_classes, self._classify = num_classes, classify
        self._is_multi_label = is_multi_label
        self._default_top_k = min(settings.default_top_k, num_classes)
        self._request_timeout_s = settings.request_timeout_s
        self._answer_timeout_s = answer_timeout_s
        self._admission, self._byte_budget = admission, byte_budget

    async def answer(
        self, read: ReadFiles, options: RequestOptions, timeline: Timeline
    ) -> RequestAnswers:
        """Answer every file of a request, in order.

        A request has ``timeout_s`` in all, reading its body included, and from then on at most the
        ``answer_timeout_s`` of the settings for its answer.

        Args:
            read: reads the files once the request is admitted.
            options: the client's wishes.
            timeline: was started when the request arrived.

        Raises:
            TandemError: for the request as a whole; nothing was read if it was not admitted.

        """
        if options.refused_before:
            meter.count(REFUSED_BEFORE, options.refused_before)
            self._admission.refused_before(options.refused_before)
        top_k = self._top_k(options.top_k, self._default_top_k)
        threshold = self._threshold(options.threshold)
        timeout_s = self._request_timeout_s
        if options.timeout_s is not None:
            timeout_s = min(timeout_s, options.timeout_s)
        answer_s = min(timeout_s, self._answer_timeout_s)
        control = options.cache_control
        use: CacheUse = "use" if control is None else cache_use_of(control)
        with self._admission.admit(answer_s), self._byte_budget.share() as share:
            with (
                self._admission.arriving(timeout_s),
                timeline.measure("read") as timeline.reading,
            ):
                body = await read(share)
            num_images = num_images_of(body.files, body.tensors)
            self._admission.holds(num_images)
            if body.timeout_s is not None:
                timeout_s = min(timeout_s, body.timeout_s)
            return await self._classify(
                ClassifyRequest(
                    body.files,
                    self._top_k(body.top_k, top_k),
                    min(timeout_s, timeline.elapsed_s() + answer_s),
                    options.request_id,
                    timeline,
                    lane_of(body.priority or options.priority, num_images),
                    tensors=body.tensors,
                    cache_use=use,
                    threshold=self._threshold(body.threshold) or threshold,
                )
            )

    def _threshold(self, given: float | None) -> float | None:
        return checked_threshold(given, is_multi_label=self._is_multi_label)

    def _top_k(self, given: int | None, default: int) -> int:
        return checked_top_k(default if given is None else given, self._num_classes)
