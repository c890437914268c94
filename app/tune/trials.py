"""Runs candidates in child processes, as many as memory allows."""

import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.compute.child_process import FunctionChild
from app.compute.cpu_affinity import Core, place_replicas, read_cores
from app.compute.group_limits import free_memory
from app.errors import ConfigError
from app.settings import Settings
from app.tune.candidates import BATCH_SIZES, Candidate, ReplicaLayout
from app.tune.pareto import RunResult
from app.tune.replica import REQUEST_S, LoadMeasured, LoadRequest, ReplicaFailed, serve_loads

START_S = 600.0  # compiling every batch size of every member, on a slow machine without a cache
LATE_S = 15.0  # after a run's time and its requests' time limit
REMEDY = "free some memory, or try on fewer cores: taskset -c 0-3 tandem tune"
REPLICA_BYTES = 1200 * 2**20  # assumed before a replica was measured
RESERVE_BYTES = 512 * 2**20  # kept free
MOST_REQUESTS = 2**16  # under way, beyond any number of clients
GROWTH = 1.15  # a replica's memory after runs, relative to its start


class ReplicaProcess(FunctionChild):
    """A child that runs the graph on ``cores``; it can be killed without cleaning up."""

    def __init__(
        self,
        settings: Settings,
        cores: Sequence[int],
        photos: Path,
        run: Callable[..., None] = serve_loads,
    ) -> None:
        super().__init__("a replica", run, settings, tuple(cores), photos, remedy=REMEDY)

    def wait_ready(self) -> int:
        """Wait until the networks are compiled; return the bytes of memory that the child uses.

        Raises:
            ConfigError: compiling failed, or the process died or does not respond.

        """
        return int(self._answer(START_S))

    def measured(self, load: LoadRequest) -> LoadMeasured:
        """Wait for the result of a load that was sent; raises as :meth:`wait_ready` does."""
        measured: LoadMeasured = self._answer(2 * load.seconds + REQUEST_S + LATE_S)
        return measured

    def _answer(self, timeout_s: float) -> Any:
        message = self.receive(time.monotonic() + timeout_s)
        if isinstance(message, ReplicaFailed):
            raise ConfigError(f"a replica failed: {message.message}")
        if message is None:
            raise ConfigError(
                f"a replica said nothing for {timeout_s:g} s; is the machine out of memory, or "
                "busy with something else?"
            )
        return message


class Trials:
    """The processes of a search; leaving the ``with`` block ends them.

    One process serves all batch sizes of a layout: it compiles all, and its queues get the largest
    one to form, as with a member's ``user_config`` in the service.
    """

    def __init__(
        self,
        settings: Settings,
        bodies: Sequence[bytes],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        only = {
            "batch_sizes": BATCH_SIZES[-1],
            "backlog_batches": False,
            # A machine of many cores gets more clients than a service should take.
            "max_concurrent_requests": MOST_REQUESTS,
            "target_wait_ms": None,
        }
        self._settings = settings.model_copy(update=only)
        self._say = say
        self._cores = read_cores()
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-tune-")
        self._photos = Path(self._folder.name) / "photos"
        self._photos.write_bytes(pickle.dumps(list(bodies)))
        self._running: dict[ReplicaLayout, list[ReplicaProcess]] = {}  # least recently used first
        self._replica_bytes = 0

    def __enter__(self) -> "Trials":
        return self

    def __exit__(self, *_: object) -> None:
        for layout in list(self._running):
            self._stop(layout)
        self._folder.cleanup()

    def measure(self, candidate: Candidate, clients: int, seconds: float) -> RunResult | None:
        """Load a candidate, with the clients divided among its replicas; None if it does not fit.

        :meth:`why_left_out` has the reason.

        Raises:
            ConfigError: a replica failed or died.

        """
        layout = candidate.layout
        cores = cores_of(layout, self._cores)
        if not cores or (layout not in self._running and not self._make_room(layout)):
            return None
        replicas = self._ready(layout, cores)
        shares = [clients // layout.replicas] * layout.replicas
        for index in range(clients % layout.replicas):
            shares[index] += 1
        most = max(candidate.batch_sizes)
        loads = [LoadRequest(share, seconds, most) for share in shares if share]
        asked = list(zip(replicas, loads, strict=False))  # the last replicas may have no clients
        for replica, load in asked:
            replica.send(load)
        answers = [replica.measured(load) for replica, load in asked]
        latencies_ms = np.concatenate([answer.latencies_ms for answer in answers])
        p50, p99 = np.percentile(latencies_ms, (50, 99))
        return RunResult(sum(answer.throughput for answer in answers), float(p50), float(p99))

    def why_left_out(self, layout: ReplicaLayout) -> str:
        return "for lack of " + (
            "memory" if cores_of(layout, self._cores) else "cores of its own for each replica"
        )

    def _ready(self, layout: ReplicaLayout, cores: Sequence[Sequence[int]]) -> list[ReplicaProcess]:
        """Return the layout's replicas, started if needed."""
        replicas = self._running.pop(layout, [])
        self._running[layout] = replicas  # moved to the end, as most recently used
        if not replicas:
            self._say(f"starting {layout}: compiling, or reading the compile cache")
            self._start(layout, cores[:1])  # the others read its compiled networks
            self._start(layout, cores[1:])
        return replicas

    def _start(self, layout: ReplicaLayout, cores: Sequence[Sequence[int]]) -> None:
        update = {
            "streams": layout.streams,
            "max_queued_images": max(self._settings.max_queued_images, 2**16),
        }
        settings = self._settings.model_copy(update=update)
        first = len(self._running[layout])
        for own in cores:
            self._running[layout].append(ReplicaProcess(settings, own, self._photos))
        for replica in self._running[layout][first:]:
            num_bytes = round(GROWTH * replica.wait_ready())
            self._replica_bytes = max(self._replica_bytes, num_bytes)

    def _make_room(self, layout: ReplicaLayout) -> bool:
        """Stop the least recently used layouts until this one fits; return whether it does."""
        needed = layout.replicas * (self._replica_bytes or REPLICA_BYTES) + RESERVE_BYTES
        while free_memory() < needed and self._running:
            self._stop(next(iter(self._running)))
        return layout.replicas == 1 or free_memory() >= needed

    def _stop(self, layout: ReplicaLayout) -> None:
        for replica in self._running.pop(layout):
            replica.end()


def cores_of(layout: ReplicaLayout, cores: Sequence[Core]) -> list[tuple[int, ...]]:
    """Return each replica's CPUs, as ``affinity`` places it; none if a replica has no place.

    A single replica is served without affinity, on all sockets. A CPU quota still limits its
    threads. A place of several has whole cores, perhaps more CPUs than the layout's cores, by which
    a replica sizes its threads.
    """
    if layout.replicas == 1:
        return [tuple(sorted(cpu for core in cores for cpu in core.cpus))]
    places = place_replicas(cores, layout.cores)[: layout.replicas]
    return [place[: layout.cores] for place in places] if len(places) == layout.replicas else []
