"""Fakes of the service and of the stages: plain objects with the real ones' methods."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from ray.serve.handle import DeploymentHandle

from app.access import ANYONE, Caller, read_keys
from app.answers import Classified, Combined, Decoded, Fault, MemberAnswer, MemberOpinion, Timings
from app.errors import OverloadedError
from app.graph.ensemble import Ensemble
from app.graph.request import ClassifyRequest, RequestAnswers, RequestBody
from app.graph.served_models import ServedMember, ServedModels, ServedRuntime
from app.graph.service import EnsembleService
from app.queueing.admission import Admission, ByteBudget
from app.queueing.scheduler import Lane
from app.serve.replica import classify_many, decode_many
from app.serve.set_stages import RemoteCombiner, RemoteDecoder, RemoteMember
from app.settings import Settings
from app.telemetry.metrics import RequestObserver, record_key
from models.ensemble import Prediction, average, top_k
from models.model_set import load_model_set
from tests.support.tiny_networks import LABELS

Pixels = np.ndarray
NOT_AN_IMAGE = Fault(400, "not_an_image", "these bytes are no image")


class FakeAdmission(Admission):
    """Lets everybody in until ``is_full``; a refusal says ``limit`` then, if that is set."""

    is_full = False
    limit: int | None = None
    num_refused_before = 0

    def refused_before(self, num: int) -> None:
        self.num_refused_before += num

    def begin(self, caller: Caller = ANYONE) -> None:
        if self.is_full:
            limit = () if self.limit is None else (self.limit,)
            raise OverloadedError("as many as the limit are under way", *limit)
        super().begin(caller)


class FakeService(EnsembleService):
    """Answers with the files' first bytes as labels; ``raises`` fails the request as a whole.

    Admission, reading, keys and limits are the real ones.
    """

    def __init__(self, settings: Settings | None = None, num_classes: int = 10) -> None:
        self.settings = settings or Settings(max_body_bytes=1000, max_files=3)
        self.name, self.num_classes = "fake", num_classes
        self._graph: Any = None  # its networks are always there
        self.sets, self.version = {"fake": self}, "0123456789ab"
        self.model_set: Any = SimpleNamespace(
            name="fake", manifest=SimpleNamespace(weights={}, fast_plan=None)
        )
        self._no_plan = None
        self._is_multi_label = False
        self._default_top_k = min(self.settings.default_top_k, num_classes)
        self._answer_timeout_s = self.settings.request_timeout_s
        self.raises: BaseException | None = None
        self.not_ready: Exception | None = None
        settings = self.settings
        self.keys = read_keys(settings.api_keys_file, record_key, settings.trusted_proxies)
        self.skipped: list[str] | None = None
        self.requests: list[ClassifyRequest] = []
        self.admission = FakeAdmission(self.settings.max_concurrent_requests)
        self.byte_budget = ByteBudget(self.settings.max_bytes_in_flight)

    def answer_within(self, seconds: float) -> None:
        self._answer_timeout_s = seconds

    async def classify(self, request: ClassifyRequest) -> RequestAnswers:
        self.requests.append(request)
        if self.raises:
            raise self.raises
        request.observer.answered()
        return [self._one(data, request.request_id) for data in request.files]

    def _one(self, data: bytes, request_id: str) -> Classified | Fault:
        if not data.startswith(b"image"):
            return NOT_AN_IMAGE
        row = Prediction(index=0, label=data.decode(), probability=0.75)
        return Classified(
            model_set="fake",
            model_version="0123456789ab",
            predictions=[row],
            members={"a": MemberOpinion(label=row.label, probability=0.75, predictions=[row])},
            agreement=True,
            degraded=False,
            skipped_members=self.skipped,
            request_id=request_id,
            timings_ms=Timings(total=1.0, stages=[]),
        )

    async def check_ready(self) -> None:
        if self.not_ready:
            raise self.not_ready

    def served_models(self) -> ServedModels:
        return ServedModels(
            model_set="fake",
            model_version="0123456789ab",
            description="",
            hint="",
            task="classification",
            input_size=8,
            resize_shorter=8,
            labels=["x"],
            max_drop=0.005,
            verified="unmeasured",
            members=[
                ServedMember("a", "INT8", 8, 1.0, "fake", ServedRuntime("openvino", "2026.0.0"))
            ],
            accuracy=[],
        )


class FakeDecoder:
    """Takes b"good..." as images whose every pixel is the file's length; the rest are faults."""

    def __init__(self) -> None:
        self.raises: BaseException | None = None
        self.fingerprint = ""
        self.lanes: list[Lane] = []
        self.num_files = 0
        self.gate: asyncio.Event | None = None
        self.calls_at_once = 1

    async def decode(self, files, left_s, lane="interactive", *, takes_heavy=True):
        self.lanes.append(lane)
        self.num_files += len(files)
        if self.gate:
            await self.gate.wait()
        if self.raises:
            raise self.raises
        good = [f for f in files if f.startswith((b"good", b"\x89PNG"))]
        images = np.array([np.full((2, 2, 3), len(f) % 256) for f in good], np.uint8)
        faults = {i: NOT_AN_IMAGE for i, f in enumerate(files) if f not in good}
        return Decoded(
            images.reshape(-1, 2, 2, 3), faults, tuple(0.01 for _ in good), self.fingerprint
        )


class FakeMember:
    """Gives images ``row``, or theirs of ``rows`` by pixel; waits for ``gate``, or raises."""

    def __init__(self, row: Sequence[float] = (0.2, 0.7, 0.1)) -> None:
        self.row = row
        self.rows: dict[int, Sequence[float] | np.ndarray] = {}
        self.seen: list[list[int]] = []  # the images' pixels, by call
        self.raises: BaseException | None = None
        self.gate: asyncio.Event | None = None
        self.asked: list[tuple[int, float]] = []
        self.lanes: list[Lane] = []
        self.was_cancelled = False
        self.calls_at_once = 1
        self.fingerprint = ""

    async def classify(self, images, left_s, lane="interactive", *, has_features=False):
        self.lanes.append(lane)
        self.asked.append((len(images), left_s))
        pixels = [int(image.flat[0]) for image in images]
        self.seen.append(pixels)
        try:
            if self.gate:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.raises:
            raise self.raises
        count = len(images)
        rows = np.array([self.rows.get(pixel, self.row) for pixel in pixels], np.float32)
        return MemberAnswer(
            rows,
            (0.001,) * count,
            (0.002,) * count,
            (count,) * count,
            self.fingerprint,
            2 * rows if has_features else None,
        )


class FakeCombiner:
    """The real arithmetic on equal weights."""

    def __init__(self) -> None:
        self.fingerprint = ""

    async def combine(self, members, k, left_s=math.inf, threshold=None, step=None):
        rows = average(members, dict.fromkeys(members, 1.0))
        own = {name: top_k(first[0], LABELS, k) for name, first in members.items()}
        agreement = len({predictions[0].index for predictions in own.values()}) == 1
        return [
            Combined(top_k(row, LABELS, k), own, agreement, 0.5, self.fingerprint) for row in rows
        ]


def arrived(clock: Callable[[], float] = time.monotonic, read_s: float = 0.0) -> RequestObserver:
    """Return the observer of a request whose body has been read; that took ``read_s``."""
    observer = RequestObserver(clock)
    observer.stage_ended("read", observer.elapsed_ms())
    reading = observer._stages["read"]
    reading.end_ms = reading.start_ms + read_s * 1e3
    return observer


async def answers_of(service, options, *files):
    with service.admit(options, RequestObserver()) as admitted:
        async with admitted.arriving():
            body = RequestBody(list(files))
        return await admitted.answer(body)


def of_model_set(settings: Settings, *stages: object) -> None:
    """Let fake stages say that they serve the settings' model set; real ones know theirs."""
    fingerprint = load_model_set(settings.model_set).fingerprint(settings.served_precision)
    for stage in stages:
        if hasattr(stage, "fingerprint"):
            stage.fingerprint = fingerprint


def service_of(settings, decoder, members, combiner, *, as_handles=False):
    """Return the real service with these stages; fakes take the fingerprint of its model set.

    ``as_handles`` puts them behind handles, as deployments of their own are.
    """
    model_set = load_model_set(settings.model_set)
    of_model_set(settings, decoder, *members.values(), combiner)
    if as_handles:
        decoder, combiner = RemoteDecoder(handle_of(decoder)), RemoteCombiner(handle_of(combiner))
        members = {name: RemoteMember(handle_of(member)) for name, member in members.items()}
    ensemble = Ensemble(settings, model_set, decoder, members, combiner)
    return EnsembleService(settings, model_set, ensemble)


def handle_of(stage: object) -> DeploymentHandle[Any]:
    return cast("DeploymentHandle[Any]", FakeHandle(stage))


class FakeHandle:
    """Looks like a deployment's handle: methods have ``remote`` and are not called themselves.

    A stage without the methods that take messages gets the real ones.
    """

    app_name = deployment_name = "fake"

    def __init__(self, stage: object) -> None:
        self._stage = stage

    def options(self, *, method_name: str, **_: str) -> "FakeMethod":
        return getattr(self, method_name)

    def __getattr__(self, method: str) -> "FakeMethod":
        if method in MANY and not hasattr(self._stage, method):
            return FakeMethod(partial(MANY[method], self._stage))
        return FakeMethod(getattr(self._stage, method))


class FakeMethod:
    def __init__(self, call: Callable) -> None:
        self.remote = call


MANY: dict[str, Callable[..., Any]] = {"decode_many": decode_many, "classify_many": classify_many}
