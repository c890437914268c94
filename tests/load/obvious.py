"""The same graph, written the obvious way: ``python tests/load/obvious.py --port 8000``.

What a reader of Serve's documentation writes first: Serve's defaults, a deployment for each stage,
``@serve.batch``, networks with a dynamic batch, responses passed on unresolved. The ladder starts
here (tests/load/ladder.py). The pixels, networks and the average are the project's own.
"""

import signal
import threading
from typing import Annotated, Any

import cv2
import numpy as np
import openvino as ov
import ray
import typer
from fastapi import FastAPI, Request
from ray import serve

from models.ensemble import average, top_k
from models.image import read_image
from models.model_set import ModelSet, load_model_set

api = FastAPI()


def model_set() -> ModelSet:
    return load_model_set("imagenette")


@serve.deployment(max_ongoing_requests=64)
class Decoder:
    def __init__(self) -> None:
        cv2.setNumThreads(1)
        self.rule = model_set().manifest.image.rule

    async def decode(self, body: bytes) -> np.ndarray:
        return read_image(body, self.rule)


@serve.deployment(max_ongoing_requests=64)
class Member:
    def __init__(self, name: str) -> None:
        self.network = ov.Core().compile_model(model_set().network_path(name, "INT8"), "CPU")

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.01)
    async def classify(self, images: list[np.ndarray]) -> list[np.ndarray]:
        return list(self.network(np.stack(images))[0])


@serve.deployment(max_ongoing_requests=64)
@serve.ingress(api)
class Ingress:
    def __init__(self, decoder: Any, members: dict[str, Any]) -> None:
        self.decoder, self.members = decoder, members
        loaded = model_set()
        self.labels = loaded.labels
        self.weights = {m.name: m.weight for m in loaded.manifest.members}

    @api.get("/readyz")
    async def readyz(self) -> dict[str, bool]:
        return {"ready": True}

    @api.post("/v1/classify")
    async def classify(self, request: Request, top_k_: int = 1) -> list[dict[str, Any]]:
        image = self.decoder.decode.remote(await request.body())
        asked = {name: m.classify.remote(image) for name, m in self.members.items()}
        rows = {name: (await response)[np.newaxis] for name, response in asked.items()}
        best = top_k(average(rows, self.weights)[0], self.labels, top_k_)
        return [{"label": one.label, "probability": one.probability} for one in best]


def main(port: Annotated[int, typer.Option()] = 8000) -> None:
    """Serve until SIGINT."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    cpus = {"ray_actor_options": {"num_cpus": 0.3}}
    names = [m.name for m in model_set().manifest.members]
    members = {n: Member.options(name=n, **cpus).bind(n) for n in names}  # type: ignore[attr-defined]
    decoder = Decoder.options(**cpus).bind()  # type: ignore[attr-defined]
    serve.run(Ingress.options(**cpus).bind(decoder, members))  # type: ignore[attr-defined]
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
