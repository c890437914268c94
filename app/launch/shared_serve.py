"""Deploys next to other applications on a cluster's Serve, and removes only our own.

Serve applies a configuration declaratively: it deletes applications that were applied before and
are not listed. So ours is applied together with the others, as Serve's controller describes them.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.deploy import start_serve
from app.launch.ray_internals import serve_client, serve_details

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema

ANSWERS_WITHIN_S = 30.0  # for a busy controller
Applications = Mapping[str, Mapping[str, Any]]  # by name, in the form of ``ServeInstanceDetails``


@contextmanager
def deployed_beside_others(config: ServeConfig) -> Iterator[None]:
    """Deploy during the block; at the end also shut Serve down if it was not running before.

    Raises:
        ConfigError: the cluster has an application of the same name or route, and nothing was
            changed; or its controller does not answer.

    """
    from ray import serve

    was_serving = serve_client() is not None
    client, ours = start_serve(config), config.application_names
    details = _details(client)
    check_free(config, details["applications"])
    try:
        client.deploy_apps(_schema(details, ours, config))
        yield
    finally:
        details = _details(client)
        if was_serving or _others(details["applications"], ours):
            client.deploy_apps(_schema(details, ours))
            for name in ours:
                serve.delete(name)  # waits until the application is deleted
        else:
            serve.shutdown()  # type: ignore[no-untyped-call]


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
