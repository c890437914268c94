"""What travels between the stages of the graph, and how a stage is called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from app.calls.hedge import HEDGE_AFTER_SHARE, HedgeBudget, hedged
from app.calls.retry import retry
from models.ensemble import Prediction, Probabilities
from models.errors import TandemError
from models.runtime import Pixels

T = TypeVar("T")
_second_calls = HedgeBudget()  # of this process


@dataclass(frozen=True, slots=True)
class Fault:
    """An image's error as a value: one bad file must not fail its neighbours."""

    status: int
    code: str
    message: str

    @classmethod
    def of(cls, error: TandemError) -> "Fault":
        return cls(error.status, error.code, error.message)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The Decoder's answer: the good images stacked, in order, and the bad ones' faults."""

    images: Pixels  # (K, H, W, 3) uint8 BGR
    faults: dict[int, Fault]  # by position in the request
    decode_ms: tuple[float, ...]  # per good image
    model_set_fingerprint: str = ""  # the model set's fingerprint; of all stages alike


@dataclass(frozen=True, slots=True)
class MemberAnswer:
    """A Classifier's answer for K images."""

    probabilities: Probabilities  # (K, C) float32
    queue_ms: tuple[float, ...]  # per image
    infer_ms: tuple[float, ...]  # of the batch that the image was in
    batch_size: tuple[int, ...]
    model_set_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Combined:
    """The Combiner's answer for one image; every list is likeliest first."""

    predictions: list[Prediction]
    members: dict[str, list[Prediction]]
    agreement: bool  # all members that answered have the same top-1
    entropy: float  # of the average's probabilities, 0 (sure) to 1 (all classes alike)
    model_set_fingerprint: str = ""


@dataclass(frozen=True)
class InProcess:
    """A stage that the Gateway makes in its own process, when its replica starts."""

    stage: Callable[..., Any]
    args: tuple[Any, ...]


def instantiate(stage: Any, *shared: Any) -> Any:
    """Make a stage of the Gateway's process, with what such stages share; a handle stays one."""
    return stage.stage(*stage.args, *shared) if isinstance(stage, InProcess) else stage


async def call(stage: Any, method: str, *args: Any, left_s: float) -> Any:
    """Call a stage, be it a deployment's handle or an object in this process.

    A handle's ``method.remote(...)`` and an object's coroutine are awaited alike, so the graph can
    put a stage into the Gateway's process without another line changing. When a deployment's
    replica dies, another is called (:mod:`app.calls.retry`); and one more when half of the
    ``left_s`` are over (:mod:`app.calls.hedge`).
    """
    bound = getattr(stage, method)
    remote = getattr(bound, "remote", None)
    if remote is None:
        return await bound(*args)
    return await hedged(
        lambda: retry(lambda: remote(*args)), HEDGE_AFTER_SHARE * left_s, _second_calls
    )
