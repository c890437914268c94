"""Fakes of the gateway and of the stages: plain objects with the real ones' methods."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from app.errors import OverloadedError
from app.graph.request import ClassifyRequest
from app.http.auth import read_keys
from app.messages import Combined, Decoded, Fault, MemberAnswer
from app.queueing.byte_budget import ByteBudget
from app.queueing.priority import Lane
from app.queueing.uploads import Uploads
from app.responses import Classified, MemberOpinion, Prediction, ServedModels, Timings
from app.settings import Settings
from models.ensemble import average, top_k
from tests.support.tiny_networks import LABELS

Pixels = np.ndarray
NOT_AN_IMAGE = Fault(400, "not_an_image", "these bytes are no image")


class FakeGateway:
    """Answers with the files' first bytes as labels; ``raises`` fails the request as a whole."""

    def __init__(self, settings: Settings | None = None, num_classes: int = 10) -> None:
        self.settings = settings or Settings(max_body_bytes=1000, max_files=3)
        self.num_classes, self.answer_timeout_s = num_classes, self.settings.request_timeout_s
        self.raises: BaseException | None = None
        self.not_ready: Exception | None = None
        self.is_full = False
        self.arriving = Uploads().arriving
        self.byte_budget = ByteBudget(self.settings.max_bytes_in_flight)
        self.keys = read_keys(self.settings)
        self.skipped: list[str] | None = None
        self.requests: list[ClassifyRequest] = []

    async def classify(self, request: ClassifyRequest) -> list[Classified | Fault]:
        self.requests.append(request)
        if self.raises:
            raise self.raises
        return [self._one(data, request.request_id) for data in request.files]

    def _one(self, data: bytes, request_id: str) -> Classified | Fault:
        if not data.startswith(b"image"):
            return NOT_AN_IMAGE
        row = Prediction(index=0, label=data.decode(), probability=0.75)
        opinion = MemberOpinion(label=row.label, probability=0.75, predictions=[row])
        return Classified(
            model_set="fake",
            predictions=[row],
            members={"a": opinion},
            agreement=True,
            degraded=False,
            skipped_members=self.skipped,
            request_id=request_id,
            timings_ms=Timings(total=1.0, stages=[]),
        )

    @property
    def admission(self) -> "FakeGateway":
        return self

    @contextmanager
    def admit(self, timeout_s: float) -> Iterator[None]:
        if self.is_full:
            raise OverloadedError("as many as the limit are under way", 7)
        yield

    async def check_ready(self) -> None:
        if self.not_ready:
            raise self.not_ready

    def served_models(self) -> ServedModels:
        return ServedModels(
            model_set="fake",
            description="",
            hint="",
            input_size=8,
            labels=["x"],
            max_drop=0.005,
            verified="unmeasured",
            members=[],
            accuracy=[],
        )


class FakeDecoder:
    """Takes b"good..." as images whose every pixel is the file's length; the rest are faults."""

    def __init__(self) -> None:
        self.raises: BaseException | None = None

    async def decode(self, files: list[bytes], left_s: float) -> Decoded:
        if self.raises:
            raise self.raises
        good = [f for f in files if f.startswith((b"good", b"\x89PNG"))]
        images = np.array([np.full((2, 2, 3), len(f) % 256) for f in good], np.uint8)
        faults = {i: NOT_AN_IMAGE for i, f in enumerate(files) if f not in good}
        return Decoded(images.reshape(-1, 2, 2, 3), faults, tuple(0.01 for _ in good))


class FakeMember:
    """Gives images ``row``, or theirs of ``rows`` by pixel; waits for ``gate``, or raises."""

    def __init__(self, row: Sequence[float] = (0.2, 0.7, 0.1)) -> None:
        self.row = row
        self.rows: dict[int, Sequence[float]] = {}
        self.seen: list[list[int]] = []  # the images' pixels, by call
        self.raises: BaseException | None = None
        self.gate: asyncio.Event | None = None
        self.asked: list[tuple[int, float]] = []
        self.lanes: list[Lane] = []
        self.was_cancelled = False

    async def classify(
        self, images: Pixels, timeout_s: float, lane: Lane = "interactive"
    ) -> MemberAnswer:
        self.lanes.append(lane)
        self.asked.append((len(images), timeout_s))
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
        return MemberAnswer(rows, (0.001,) * count, (0.002,) * count, (count,) * count)


class FakeCombiner:
    """The real arithmetic on equal weights."""

    async def combine(self, members: dict[str, np.ndarray], k: int) -> list[Combined]:
        rows = average(members, dict.fromkeys(members, 1.0))
        own = {name: top_k(first[0], LABELS, k) for name, first in members.items()}
        agreement = len({predictions[0].index for predictions in own.values()}) == 1
        return [Combined(top_k(row, LABELS, k), own, agreement, 0.5) for row in rows]


class FakeHandle:
    """Looks like a deployment's handle: methods have ``remote`` and are not called themselves."""

    def __init__(self, stage: object) -> None:
        self._stage = stage

    def __getattr__(self, method: str) -> "FakeMethod":
        return FakeMethod(getattr(self._stage, method))


class FakeMethod:
    def __init__(self, call: Callable) -> None:
        self.remote = call
