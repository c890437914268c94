"""A client of Tandem: ``Client("http://127.0.0.1:8000").classify("photo.jpg").label``.

:mod:`tandem_client.grpc_client` is the client over gRPC, which needs the extra ``grpc``.
"""

from tandem_client.answers import (
    Classification,
    MemberOpinion,
    Prediction,
    Result,
    StageTiming,
    Timings,
)
from tandem_client.async_client import AsyncClient
from tandem_client.client import Client
from tandem_client.errors import (
    BadAnswer,
    BadImage,
    BadRequest,
    BrokenOff,
    DeadlineExceeded,
    Degraded,
    NotReady,
    Overloaded,
    ServiceError,
    TandemError,
    Unauthorized,
    Unreachable,
)
from tandem_client.images import Channels, Image
from tandem_client.retries import RetryPolicy
from tandem_client.tls import Tls
from tandem_client.version import __version__

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
    "Timings",
    "Tls",
    "Unauthorized",
    "Unreachable",
    "__version__",
]
