"""Deploys the configuration on a running Ray, waits until every member answers, and removes it.

Serve applies a configuration declaratively: it deletes applications that were applied before and
are not listed. So on a shared cluster ours is applied together with the others, as Serve's
controller describes them. Only ours is removed.
"""

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from app.errors import ConfigError, NotReadyError
from app.launch.checks import REACHED_AT, HttpOptions
from app.launch.config import LOOPBACK_OPTIONS, ServeConfig
from app.launch.ray_cluster import StopRequest, shut_down_serve
from app.launch.ray_features import serve_client, serve_details

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema


ReportProgress = Callable[[str], None]
# The last line of a traceback. For our own errors only the message is shown.
RAISED = re.compile(
    r"^(?:models|app)\.[\w.]+: (?P<ours>.*)|^(?P<other>[\w.]+(?:Error|Exception): .*)", re.MULTILINE
)
# Statuses of calls that did not reach the application: HAProxy knows no replica yet (NOT_FOUND), or
# the replica does not listen yet.
ON_THE_WAY = ("NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN")
GRPC_ANSWERS_WITHIN_S = 5.0
# No method of tandem.proto: a replica's server answers UNIMPLEMENTED without calling the
# application, so that no request is counted. Healthz would not do, since HAProxy answers it itself
# as long as it knows of no replica.
READY_METHOD = "/tandem.v1.Ensemble/Ready"
ANSWERS_WITHIN_S = 30.0  # for a busy controller
Applications = Mapping[str, Mapping[str, Any]]  # by name, in the form of ``ServeInstanceDetails``


def deploy(config: ServeConfig) -> None:
    """Hand the configuration to Serve, as ``serve run`` does, and return at once."""
    client, schema = start_serve(config)
    client.deploy_apps(schema)  # applications that it does not list are deleted


def start_serve(config: ServeConfig) -> tuple[Any, "ServeDeploySchema"]:
    """Start Serve with the configuration's options; return its client and the configuration.

    A Serve that already runs keeps its own options.

    Raises:
        NotReadyError: its controller died.

    """
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(config.as_dict())
    with contextlib.suppress(RayActorError):  # of a slow proxy, in whose place Serve starts another
        serve.start(
            http_options=schema.http_options.model_dump(),
            proxy_location=schema.proxy_location,
            grpc_options=schema.grpc_options.model_dump(),
            controller_options=schema.controller_options,
            logging_config=schema.logging_config,
        )
    if (client := serve_client()) is None:
        raise NotReadyError("Serve's controller died at its start: try again; Ray's logs say why")
    return client, schema


def client_of(url: str, socket: Path | None = None) -> httpx.Client:
    """Return an HTTP client of the service on this machine.

    With ``socket`` it connects to HAProxy's Unix socket, without TLS. The service's public port may
    require a client certificate, which this command does not have.
    """
    transport = None if socket is None else httpx.HTTPTransport(uds=str(socket))
    return httpx.Client(
        base_url=url if socket is None else httpx.URL(url).copy_with(scheme="http"),
        transport=transport,
        timeout=10,
        trust_env=False,  # HTTP_PROXY does not apply to this machine
        verify=False,  # nothing secret is sent; the certificate names the public host
        limits=httpx.Limits(max_keepalive_connections=0),  # HAProxy may be reloaded meanwhile
    )


def grpc_reaches(target: str, application: str) -> bool:
    """Call a method that does not exist, to see whether gRPC calls reach the application.

    ``target`` is an address in grpcio's form. The call has a new connection, since HAProxy may be
    reloaded meanwhile.
    """
    import grpc

    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    metadata = (("application", application),)
    with grpc.insecure_channel(target, options) as channel:
        call = channel.unary_unary(READY_METHOD)
        try:
            call(b"", timeout=GRPC_ANSWERS_WITHIN_S, metadata=metadata)
        except grpc.RpcError as error:
            return error.code().name not in ON_THE_WAY
    return True


def wait_ready(
    client: httpx.Client,
    stop: StopRequest,
    report: ReportProgress,
    timeout_s: float = 300.0,
    *,
    applications: Collection[str],
    grpc: Callable[[], bool] | None = None,
) -> bool:
    """Wait until /readyz reports ready; return False if ``stop`` is set first.

    A cluster may have other ``applications`` than ours, which do not count. With ``grpc`` its
    result must be true too: whether a gRPC call reaches the application.

    Raises:
        ConfigError: a deployment of ours failed (the message says why), or ``timeout_s`` passed.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if stop.is_set():
            return False
        report(_progress(applications))
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/readyz").status_code == 200 and (grpc is None or grpc()):
                return True
        stop.wait(0.25)
    raise ConfigError(f"not ready after {timeout_s:g} s: {_progress(applications)}")


def wants_key(client: httpx.Client) -> bool:
    """Return whether the service requires a key, by calling it without one."""
    with contextlib.suppress(httpx.HTTPError):
        return client.get("/v1/models").status_code == 401
    return False


def _progress(applications: Collection[str]) -> str:
    """Return the progress of their deployments.

    Raises:
        ConfigError: one failed for good.
    """
    from ray import serve

    waiting = []
    status = serve.status().applications
    for name, application in ((n, status[n]) for n in status if n in applications):
        stages = application.deployments
        if application.status == "DEPLOY_FAILED":
            reasons = {name: reason_in(stage.message) for name, stage in stages.items()}
            lines = [f"{stage}: {reason}" for stage, reason in reasons.items() if reason]
            why = "; ".join(lines) or application.message
            raise ConfigError(f"{name} could not be deployed: {why}")
        waiting += [name for name, stage in stages.items() if stage.status != "HEALTHY"]
    return f"loading {', '.join(waiting)}" if waiting else "starting"


def reason_in(message: str) -> str | None:
    """Return the error that ended a replica, without the traceback that Serve adds to it."""
    raised = list(RAISED.finditer(message))
    return (raised[-1]["ours"] or raised[-1]["other"]) if raised else None


@contextmanager
def deployed_beside_others(config: ServeConfig) -> Iterator[ServeConfig]:
    """Deploy during the block; at the end also shut Serve down if it was not running before.

    Yields the configuration with the address at which the cluster answers.

    Raises:
        ConfigError: the cluster has an application of the same name or route, and nothing was
            changed; or its controller does not answer.
    """
    import ray
    from ray import serve

    was_serving = serve_client() is not None
    (client, _), ours = start_serve(config), config.application_names
    details = _details(client)
    check_free(config, details["applications"])
    try:
        client.deploy_apps(_schema(details, ours, config))
        yield as_served(config, details, ray.get_runtime_context().get_node_id())
    finally:
        details = _details(client)
        if was_serving or _others(details["applications"], ours):
            client.deploy_apps(_schema(details, ours))
            for name in ours:
                serve.delete(name)  # waits until the application is deleted
        else:
            shut_down_serve(client)


def as_served(config: ServeConfig, details: Mapping[str, Any], node_id: str) -> ServeConfig:
    """Return the configuration with the address and the ports at which the cluster answers.

    A Serve that already ran keeps its own options. A node without replicas, as this one with
    ``node_id`` may be, has no proxy: then the address is that of a node that has one.
    """
    http = LOOPBACK_OPTIONS | details.get("http_options", {})
    proxies = details.get("proxies", {})
    if proxies and node_id not in proxies and http["host"] in REACHED_AT:
        http["host"] = next(proxy["node_ip"] for proxy in proxies.values())
    has_grpc = config.grpc_port is not None
    return config.changed(
        http={name: http.get(name) for name in HttpOptions.model_fields},
        grpc_port=details.get("grpc_options", {}).get("port") if has_grpc else None,
    )


def check_free(config: ServeConfig, running: Applications) -> None:
    """Raise :class:`ConfigError` if another application has one of our names or routes."""
    for application in config.content["applications"]:
        name, route = application.get("name", "default"), application.get("route_prefix", "/")
        for other, details in _others(running, ()).items():
            same = "name" if other == name else "route"
            if other == name or (route is not None and details.get("route_prefix") == route):
                raise ConfigError(
                    f"the cluster serves an application {other!r} at "
                    f"{details.get('route_prefix')}, which has the {same} of {name!r} at {route}: "
                    "give ours another name and route_prefix (--config FILE), or delete the other "
                    f"one: python -c 'from ray import serve; serve.delete(\"{other}\")'"
                )


def _schema(
    details: Mapping[str, Any], ours: Collection[str], config: ServeConfig | None = None
) -> "ServeDeploySchema":
    """Return the configuration of the other applications, with ``config`` added if not None."""
    from ray.serve.schema import ServeDeploySchema

    theirs = [
        application["deployed_app_config"]
        for application in _others(details["applications"], ours).values()
        if application.get("source") == "declarative" and application.get("deployed_app_config")
    ]
    content = {"applications": []} if config is None else config.as_dict()
    # Options at the top level would also apply to the other applications.
    logging = content.pop("logging_config", None)
    own = [{"logging_config": logging, **application} for application in content["applications"]]
    applied = content | {
        "applications": [*theirs, *own],
        "target_capacity": details.get("target_capacity"),
    }
    return ServeDeploySchema.model_validate(applied)


def _others(applications: Applications, ours: Collection[str]) -> dict[str, Mapping[str, Any]]:
    return {
        name: application
        for name, application in applications.items()
        if name not in ours and application["status"] != "DELETING"
    }


def _details(client: Any) -> dict[str, Any]:
    from ray.exceptions import RayError

    try:
        return serve_details(client, ANSWERS_WITHIN_S)
    except (RayError, TimeoutError) as error:
        raise ConfigError(
            f"the controller of the cluster's Serve does not say within {ANSWERS_WITHIN_S:g} s "
            f"what it serves ({type(error).__name__}): look at serve status, then try again"
        ) from error
