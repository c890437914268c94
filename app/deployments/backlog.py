"""Prepares a member's network for the larger batches of a backlog, while it serves."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from app.compute.group_limits import free_memory
from app.queueing.backlog_size import BacklogSize
from app.settings import Settings
from models import golden
from models.model_set import ModelSet
from models.runtimes.interface import LoadedNetwork

RESERVE_BYTES = 512 * 2**20  # left to everything else


def backlog_size(
    settings: Settings, model_set: ModelSet, member: str, network: LoadedNetwork, num_places: int
) -> BacklogSize | None:
    """Return the size for a member whose batches have ``num_places``; None: it gets none."""
    if not settings.backlog_batches or network.fixed_batch:
        return None
    usual = network.max_batch_size

    def add() -> None:
        needed = network.memory_bytes + RESERVE_BYTES
        if (free := free_memory()) < needed:
            raise MemoryError(f"{free / 1e6:.0f} MB are free, it takes up to {needed / 1e6:.0f}")
        model_set.network_path(
            member, settings.precision
        )  # it is read anew: as it was, or not at all
        network.add_batch_size(2 * usual)
        if (expected := model_set.golden) is None:
            return
        precision = model_set.manifest.member(member).precision_of(settings.precision)
        try:
            golden.check(expected, member, precision, network)  # in batches of that size
        except Exception:
            network.remove_batch_size(2 * usual)
            raise

    async def prepare() -> None:
        # A thread of its own: what it used of the network goes with it.
        thread = ThreadPoolExecutor(1, "compile")
        try:
            await asyncio.get_running_loop().run_in_executor(thread, add)
        finally:
            thread.shutdown(wait=False)

    return BacklogSize(member, usual, num_places, prepare)
