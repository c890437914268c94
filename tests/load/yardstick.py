"""A server for the same networks as one writes it by hand: ``python tests/load/yardstick.py``.

What Tandem is held against (tests/load/overhead.py): FastAPI and uvicorn in one process, an image a
body or a form of many. Images wait in a queue on the event loop; a thread for each core takes what
waits, decodes it with plain OpenCV and runs the INT8 networks in static shapes. There are no
limits, deadlines, metrics or traces: nothing but the answer.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Annotated

import cv2
import openvino as ov
import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from yardstick_pipeline import SIZES, Network, Pipeline

from models.model_set import load_model_set

FULL = 0.75  # of a compiled size: less would compute more padding than it is worth
MAX_WAIT_S = 0.004  # of a worker for more images, while another works
Answer = bytes | None
Waiting = tuple[bytes, int, "asyncio.Future[Answer]"]


class Worker:
    """A thread that answers one batch at a time."""

    def __init__(self, pipeline: Pipeline, queue: "BatchQueue") -> None:
        self._pipeline, self._queue = pipeline, queue
        self._loop = asyncio.get_running_loop()
        self._batches: SimpleQueue[list[Waiting]] = SimpleQueue()
        Thread(target=self._run, name="inference", daemon=True).start()

    def start(self, batch: list[Waiting]) -> None:
        self._batches.put(batch)

    def _run(self) -> None:
        while True:
            batch = self._batches.get()
            try:
                answers: Sequence[Answer] = self._pipeline.answer([(b, k) for b, k, _ in batch])
            except Exception as error:  # told to those who wait
                self._loop.call_soon_threadsafe(self._queue.failed, self, batch, error)
            else:
                self._loop.call_soon_threadsafe(self._queue.done, self, batch, answers)


class BatchQueue:
    """Gives what waits to the workers that are free, as evenly as it can.

    A worker that is free while others work waits a moment for its share of the images under way:
    clients that were just answered together send their next ones together.
    """

    def __init__(self, pipelines: Sequence[Pipeline]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Waiting] = deque()
        self._free = [Worker(pipeline, self) for pipeline in pipelines]
        self._num_workers, self._num_running = len(self._free), 0
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, body: bytes, top_k: int) -> "asyncio.Future[Answer]":
        """Return what will be the answer; what arrives in one turn of the loop can be a batch."""
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting.append((body, top_k, future))
        if self._free and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._dispatch)
        return future

    def done(self, worker: Worker, batch: list[Waiting], answers: Sequence[Answer]) -> None:
        self._release(worker, batch)
        for (_, _, future), answer in zip(batch, answers, strict=True):
            if not future.done():  # its client may have gone
                future.set_result(answer)

    def failed(self, worker: Worker, batch: list[Waiting], error: Exception) -> None:
        self._release(worker, batch)
        for _, _, future in batch:
            if not future.done():
                future.set_exception(error)

    def _release(self, worker: Worker, batch: list[Waiting]) -> None:
        self._free.append(worker)
        self._num_running -= len(batch)
        self._loop.call_soon(self._dispatch)

    def _dispatch(self, is_late: bool = False) -> None:
        self._is_due = False
        while self._free and self._waiting:
            if not is_late and not self._is_fair():
                if self._timer is None:
                    self._timer = self._loop.call_later(MAX_WAIT_S, self._dispatch, True)
                return
            self._start(batch_size(-(-len(self._waiting) // len(self._free))))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_fair(self) -> bool:
        """Tell whether a free worker should begin: its share waits, or nobody else works."""
        share = -(-(len(self._waiting) + self._num_running) // self._num_workers)
        return not self._num_running or len(self._waiting) >= min(share, SIZES[-1])

    def _start(self, size: int) -> None:
        batch = [self._waiting.popleft() for _ in range(size)]
        self._num_running += size
        self._free.pop().start(batch)


def batch_size(num_waiting: int) -> int:
    """Return how many to take: all if they nearly fill a compiled size, else a smaller size."""
    above = next((size for size in SIZES if size >= num_waiting), SIZES[-1])
    if num_waiting >= FULL * above:
        return min(num_waiting, above)
    return above // 2


def application(model_set: str, is_null: bool, threads: int) -> FastAPI:
    """Return the server; networks are compiled when it starts."""

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        cv2.setNumThreads(1)
        loaded, core = load_model_set(model_set), ov.Core()
        networks = [
            Network(core, str(loaded.network_path(member.name, "INT8")), threads)
            for member in ([] if is_null else loaded.manifest.members)
        ]
        pipelines = [Pipeline(loaded, networks) for _ in range(threads)]
        for pipeline in pipelines:
            for size in SIZES:
                pipeline.answer([(b"", 1)] * size)
        api.state.queue = BatchQueue(pipelines)
        yield

    api = FastAPI(lifespan=lifespan)

    @api.get("/readyz")
    async def readyz() -> dict[str, bool]:
        return {"ready": True}

    @api.post("/v1/classify")
    async def classify(request: Request, top_k: int = 5) -> Response:
        queue: BatchQueue = api.state.queue
        if request.headers.get("content-type", "").startswith("multipart/"):
            return await form(request, queue, top_k)
        answer = await queue.submit(await request.body(), top_k)
        if answer is None:
            raise HTTPException(400, "not an image")
        return Response(answer, media_type="application/json")

    return api


async def form(request: Request, queue: BatchQueue, top_k: int) -> Response:
    """Answer a multipart form: a result for each file, in order."""
    async with request.form() as fields:
        files = [file for _, file in fields.multi_items() if not isinstance(file, str)]
        bodies = [await file.read() for file in files]
    answers = await asyncio.gather(*(queue.submit(body, top_k) for body in bodies))
    rows = (b'{"error": "not an image"}' if answer is None else answer for answer in answers)
    return Response(b'{"results": [' + b", ".join(rows) + b"]}", media_type="application/json")


def main(
    port: Annotated[int, typer.Option()] = 8000,
    model_set: Annotated[str, typer.Option(help="name or folder")] = "imagenette",
    null: Annotated[bool, typer.Option(help="no networks: a constant answer")] = False,
    threads: Annotated[int, typer.Option(help="batches at a time; 0: the cores")] = 0,
) -> None:
    """Serve until SIGINT, on loopback; uvicorn takes uvloop and httptools, which Ray brings."""
    count = threads or len(os.sched_getaffinity(0))
    uvicorn.run(application(model_set, null, count), port=port, access_log=False)


if __name__ == "__main__":
    typer.run(main)
