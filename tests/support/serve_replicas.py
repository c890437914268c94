"""What app/deployments uses of a replica of Serve's, without Ray."""

from types import SimpleNamespace

from ray.serve._private.common import DeploymentID
from ray.serve._private.replica import Replica
from ray.serve._private.utils import Semaphore


class Metrics:
    """Notes what Serve's manager of metrics is told."""

    def __init__(self) -> None:
        self.num_ongoing = 0
        self.most_ongoing = 0
        self.requests: list[dict] = []
        self.ingress: list[dict] = []

    def inc_num_ongoing_requests(self, request_metadata) -> None:
        assert request_metadata.is_direct_ingress
        self.num_ongoing += 1
        self.most_ongoing = max(self.most_ongoing, self.num_ongoing)

    def dec_num_ongoing_requests(self, request_metadata) -> None:
        self.num_ongoing -= 1

    def record_request_metrics(self, **told) -> None:
        assert told.pop("latency_ms") >= 0
        self.requests.append(told)

    def record_ingress_request_metrics(self, **told) -> None:
        assert told.pop("latency_ms") >= 0
        self.ingress.append(told)


def made_replica(max_ongoing_requests: int = 2) -> SimpleNamespace:
    """Return what is used of Serve's replica."""
    cancelled: list[str] = []
    return SimpleNamespace(
        _deployment_id=DeploymentID("Gateway", "tandem"),
        _replica_id=SimpleNamespace(unique_id="r1"),
        _route_prefix="/",
        _semaphore=Semaphore(lambda: max_ongoing_requests),
        _metrics_manager=Metrics(),
        _user_callable_wrapper=SimpleNamespace(_run_user_code_in_separate_thread=False),
        _on_request_cancelled=lambda metadata, _: cancelled.append(metadata.internal_request_id),
        max_queued_requests=256,
        cancelled=cancelled,
    )


def real_replica() -> Replica:
    """Return one of Serve's class, with no more than :func:`made_replica` has."""
    real = Replica.__new__(Replica)
    vars(real).update({k: v for k, v in vars(made_replica()).items() if not k.startswith("max")})
    vars(real)["_deployment_config"] = SimpleNamespace(max_queued_requests=256)
    return real
