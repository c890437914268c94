"""Classifies a picture in processes that each have a Ray without a name.

``python -m tests.support.names_taken_away MODEL_SET`` reads names (``MODULE NAME``) from its
standard input, a line each. For each it forks, takes the name away before anything of ``app`` is
imported, binds the graph as ``serve run`` does, with the members as deployments, and has a Gateway
answer a request over ASGI. It prints a line of JSON for each.
"""

import asyncio
import contextlib
import importlib
import io
import json
import logging
import os
import sys
from enum import Enum, EnumType
from types import ModuleType
from typing import Any

import httpx

# What the service is built from, imported once and not by every child.
BUILT_FROM = (
    *("fastapi", "ray.serve", "ray.serve.request_router", "opentelemetry.sdk.trace"),
    *("openvino", "cv2", "scipy.sparse", "orjson", "python_multipart", "aiohttp"),
)


def main() -> None:
    (model_set,) = sys.argv[1:]
    names = [line.split() for line in sys.stdin.read().splitlines()]
    for module in {*BUILT_FROM, *(module for module, _ in names)}:
        importlib.import_module(module)
    for module, name in names:
        if (child := os.fork()) == 0:
            status = 1
            try:
                print(json.dumps(_without(module, name, model_set)), flush=True)
                status = 0
            finally:
                os._exit(status)
        os.waitpid(child, 0)


def _without(module: str, name: str, model_set: str) -> dict[str, Any]:
    take_away(module, name)
    log = io.StringIO()
    logging.getLogger("ray.serve").addHandler(logging.StreamHandler(log))
    answer: dict[str, Any] = {"name": f"{module}.{name}"}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer |= asyncio.run(_classified(model_set))
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer | {"log": log.getvalue()}


def take_away(module: str, name: str) -> None:
    """Take a name from its module, or from what is there; a field goes from its class's record."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    for record in ("__dataclass_fields__", "model_fields"):
        fields = getattr(owner, record, None)
        if isinstance(fields, dict) and last in fields:
            del fields[last]
    if isinstance(owner, EnumType):  # its members cannot be deleted
        others = [member for member in owner.__members__ if member != last]
        setattr(importlib.import_module(module), path[-1], Enum(owner.__name__, others))
        return
    if not path:  # Ray's own functions keep it: it has another name for them
        kept = {key: value for key, value in vars(owner).items() if key != last}
        sys.modules[module] = ModuleType(module)
        vars(sys.modules[module]).update(kept)
        return
    for parent in owner.__mro__:
        if last in vars(parent):
            delattr(parent, last)


async def _classified(model_set: str) -> dict[str, Any]:
    from app.main import build
    from app.settings import Settings
    from tests.support.tiny_networks import picture

    settings = Settings(
        model_set=model_set,
        members="deployment",
        batch_sizes=[1],
        allow_unverified=True,
        compile_cache=None,
        trace_exporter="none",
    )
    application: Any = build(settings)
    stages = application._bound_deployment.init_args[2] or {}
    routers = {
        name: stage._bound_deployment._deployment_config.request_router_config.request_router_class
        for name, stage in stages.items()
    }
    from app.serve.gateway import Gateway

    gateway = Gateway(settings.model_copy(update={"members": "gateway"}))
    await gateway.check_health()
    api = gateway.__serve_build_asgi_app__()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://x") as client:
        answer = await client.post("/v1/classify", content=picture("red"))
    return {
        "status": answer.status_code,
        "label": answer.json()["predictions"][0]["label"],
        "routers": routers,
    }


if __name__ == "__main__":
    main()
