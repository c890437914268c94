"""Deploys beside the applications of others on a cluster's Serve, and takes only ours back.

Serve applies a configuration declaratively: applications that were applied before and are not in it
are deleted. So what is applied is ours and what others applied, as Serve's controller has it.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.deploy import start_serve
from app.launch.ray_internals import ServeClient

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

ANSWERS_WITHIN_S = 30.0  # a controller with much to do
Applications = Mapping[str, Mapping[str, Any]]  # by name, as ``ServeInstanceDetails`` has them


@contextmanager
def deployed_beside_others(config: ServeConfig) -> Iterator[None]:
    """Deploy while the ``with`` block runs; Serve is ended too if it was not there before.

    Raises:
        ConfigError: the cluster has an application of the same name or route, and nothing was
            changed; or its controller does not answer.

    """
    from ray import serve

    was_serving = ServeClient.running() is not None
    client, ours = start_serve(config), config.application_names
    details = _details(client)
    check_free(config, details["applications"])
    client.deploy(_schema(details, ours, config))
    try:
        yield
    finally:
        details = _details(client)
        if was_serving or _others(details["applications"], ours):
            client.deploy(_schema(details, ours))
            for name in ours:
                serve.delete(name)  # waits until it is gone
        else:
            serve.shutdown()  # type: ignore[no-untyped-call]


def check_free(config: ServeConfig, running: Applications) -> None:
    """Raise :class:`ConfigError` if an application of the cluster has a name or route of ours."""
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
    """Return what others have applied, and ``config`` if it is given, as one configuration."""
    from ray.serve.schema import ServeDeploySchema

    theirs = [
        application["deployed_app_config"]
        for application in _others(details["applications"], ours).values()
        if application.get("source") == "declarative" and application.get("deployed_app_config")
    ]
    content = {"applications": []} if config is None else config.as_dict()
    # What is at the top would be given to the applications of others too.
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


def _details(client: ServeClient) -> dict[str, Any]:
    from ray.exceptions import RayError

    try:
        return client.details(ANSWERS_WITHIN_S)
    except (RayError, TimeoutError) as error:
        raise ConfigError(
            f"the controller of the cluster's Serve does not say within {ANSWERS_WITHIN_S:g} s "
            f"what it serves ({type(error).__name__}): look at serve status, then try again"
        ) from error
