"""A client of Tandem: ``Client("http://127.0.0.1:8000").classify("photo.jpg").label``.

:mod:`tandem_client.grpc_client` is the client over gRPC, which needs the extra ``grpc``.
"""

from tandem_client.answers import (
    BadAnswer,
    BadImage,
    BadRequest,
    BrokenOff,
    Classification,
    DeadlineExceeded,
    Degraded,
    Erased,
    Feedback,
    MemberOpinion,
    NotReady,
    Overloaded,
    Prediction,
    Result,
    ServiceError,
    StageTiming,
    TandemError,
    Taught,
    TaughtFigures,
    Timings,
    Unauthorized,
    Unreachable,
)
from tandem_client.client import AsyncClient, Client
from tandem_client.exchange import RetryPolicy, Tls
from tandem_client.images import Channels, Image, __version__

__all__ = [
    "AsyncClient",
    "BadAnswer",
    "BadImage",
    "BadRequest",
    "BrokenOff",
    "Channels",
    "Classification",
    "Client",
    "DeadlineExceeded",
    "Degraded",
    "Erased",
    "Feedback",
    "Image",
    "MemberOpinion",
    "NotReady",
    "Overloaded",
    "Prediction",
    "Result",
    "RetryPolicy",
    "ServiceError",
    "StageTiming",
    "TandemError",
    "Taught",
    "TaughtFigures",
    "Timings",
    "Tls",
    "Unauthorized",
    "Unreachable",
    "__version__",
]
