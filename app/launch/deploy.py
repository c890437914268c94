"""Deploys the configuration on a running Ray and waits until every member answers."""

import contextlib
import re
import time
from collections.abc import Callable

import httpx

from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.ray_internals import ServeClient
from app.launch.stop_request import StopRequest

ReportProgress = Callable[[str], None]
# A traceback's last line; nothing but the message is said of our own errors.
RAISED = re.compile(
    r"^(?:models|app)\.[\w.]+: (?P<ours>.*)|^(?P<other>[\w.]+(?:Error|Exception): .*)", re.MULTILINE
)


def deploy(config: ServeConfig) -> None:
    """Hand the configuration to Serve, as ``serve run`` does, and return at once."""
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(config.as_dict())
    serve.start(
        http_options=schema.http_options.model_dump(),
        proxy_location=schema.proxy_location,
        grpc_options=schema.grpc_options.model_dump(),
        controller_options=schema.controller_options,
        logging_config=schema.logging_config,
    )
    client = ServeClient.running()
    assert client is not None  # it was just started
    client.deploy(schema)


def wait_ready(
    url: str, stop: StopRequest, report: ReportProgress, timeout_s: float = 300.0
) -> bool:
    """Wait until /readyz says so; return False when asked to stop first.

    Raises:
        ConfigError: a deployment failed (with its message), or ``timeout_s`` passed.

    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if stop.is_asked:
            return False
        report(_progress())
        with contextlib.suppress(httpx.HTTPError):
            if _get(f"{url}/readyz").status_code == 200:
                return True
        stop.wait(0.25)
    raise ConfigError(f"not ready after {timeout_s:g} s: {_progress()}; Ray's logs: /tmp/ray")


def wants_key(url: str) -> bool:
    """Ask the service whether it lets in callers without a key: it knows, its settings only say."""
    with contextlib.suppress(httpx.HTTPError):
        return _get(f"{url}/v1/models").status_code == 401
    return False


def _get(url: str) -> httpx.Response:
    """Ask the service on this machine; nothing is sent that a wrong answerer could use."""
    # trust_env: HTTP_PROXY is not for it. verify: its certificate has the name others know it by.
    return httpx.get(url, timeout=10, trust_env=False, verify=False)


def _progress() -> str:
    """Say how far the deployments are; raise when one has failed for good."""
    from ray import serve

    waiting = []
    for name, application in serve.status().applications.items():
        if application.status == "DEPLOY_FAILED":
            reasons = [
                f"{stage}: {reason}"
                for stage, status in application.deployments.items()
                if (reason := reason_in(status.message))
            ]
            told = "; ".join(reasons) or application.message
            raise ConfigError(f"{name} could not be deployed: {told}")
        waiting += [n for n, d in application.deployments.items() if d.status != "HEALTHY"]
    return f"loading {', '.join(waiting)}" if waiting else "starting"


def reason_in(message: str) -> str | None:
    """Return the error that ended a replica, without the traceback that Serve wraps it in."""
    found = list(RAISED.finditer(message))
    return (found[-1]["ours"] or found[-1]["other"]) if found else None
