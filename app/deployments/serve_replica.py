"""The replica of Serve that a Gateway runs in: what its wrapper does for a request.

Serve 2.60 passes every HTTP request of HAProxy's to ``Replica._direct_ingress_asgi``, which makes
its metadata, watches for the client's disconnect, takes a place, counts, times and traces it. What
of this a plain request needs is here, by the same methods and counters of the same object, so that
draining, autoscaling, ``max_ongoing_requests`` and Serve's metrics know of these requests as of any
other. The private names are listed in :mod:`app.calls.ray_features`, and looked up at start.
"""

import asyncio
import logging
import random
from typing import Any

from ray.serve._private.common import RequestMetadata, RequestProtocol
from ray.serve._private.replica import Replica
from ray.serve.context import _RequestContext, _serve_request_context

from app.deployments.access_log import drops_access_log
from app.tracing.spans import Value

METHOD = "__call__"  # of the ingress, by Serve's convention
logger = logging.getLogger("ray.serve")


class ServeReplica:
    """Serve's replica, for requests of one route that do not go through its wrapper.

    Args:
        replica: it has been initialised.
        verb: the requests' method.
        path: the requests' path, which is the route too.

    """

    def __init__(self, replica: Replica, verb: str, path: str) -> None:
        self._replica, self._metrics = replica, replica._metrics_manager
        self._places: Any = replica._semaphore
        self._verb, self._path = verb, path
        self._name = replica._deployment_id
        self._metadata = self._metadata_of("", "")
        self.span_name = f"replica_handle_request {self._name.name} {METHOD}"
        self._attributes: dict[str, Value] = {
            "replica_id": replica._replica_id.unique_id,
            "deployment": self._name.name,
            "app": self._name.app_name,
            "call_method": METHOD,
            "route": path,
            "multiplexed_model_id": "",
            "is_streaming": True,
            "resource.name": self.span_name,
            "http.method": verb,
            "http.route": path,
        }

    def has_place(self) -> bool:
        """Whether a request can begin at once, and nothing is on that Serve's wrapper alone does.

        That is its access log. While all places are taken requests queue, and Serve's way is the
        one that knows how long the queue may be.
        """
        return not self._places.locked() and drops_access_log(logger)

    async def take_place(self, request_id: str) -> str:
        """Begin a request in its own task, if :meth:`has_place` is true: this does not wait then.

        Returns:
            The identity by which Serve knows the request's calls of other deployments.

        """
        await self._places.acquire()
        self._metrics.inc_num_ongoing_requests(self._metadata)
        internal_id = f"{random.getrandbits(128):032x}"  # Serve's too is no secret
        context = _RequestContext(
            route=self._path,
            request_id=request_id,
            _internal_request_id=internal_id,
            app_name=self._name.app_name,
            cancel_on_parent_request_cancel=True,
        )
        _serve_request_context.set(context)  # type: ignore[arg-type]
        return internal_id

    def leave_place(self) -> None:
        """End a request that :meth:`take_place` began."""
        self._metrics.dec_num_ongoing_requests(self._metadata)
        self._places.release()

    def record(self, status: int, latency_ms: float, error: BaseException | None) -> None:
        """Count a request that has ended; ``error`` is what the application raised, if it did."""
        self._metrics.record_request_metrics(
            route=self._path,
            latency_ms=latency_ms,
            is_error=error is not None,
            exception_type=None if error is None else type(error).__name__,
        )
        self._metrics.record_ingress_request_metrics(
            protocol=RequestProtocol.HTTP,
            method=self._verb,
            route=self._path,
            app_name=self._name.app_name,
            deployment_name=self._name.name,
            latency_ms=latency_ms,
            is_error=status >= 400,
            status_code=str(status),
        )

    def cancel_calls(self, internal_id: str, error: asyncio.CancelledError) -> None:
        """Cancel a request's calls of other deployments."""
        self._replica._on_request_cancelled(self._metadata_of("", internal_id), error)

    def span_attributes(self, request_id: str, status: int) -> dict[str, Value]:
        """Return the attributes that Serve gives a request's span, and the status of ours."""
        return {
            "request_id": request_id,
            **self._attributes,
            "http.status_code": str(status),
            "http.response.status_code": status,
        }

    def _metadata_of(self, request_id: str, internal_id: str) -> RequestMetadata:
        return RequestMetadata(
            request_id=request_id,
            internal_request_id=internal_id,
            call_method=METHOD,
            route=self._path,
            app_name=self._name.app_name,
            is_streaming=True,
            _request_protocol=RequestProtocol.HTTP,
            _http_method=self._verb,
            is_direct_ingress=True,
        )
