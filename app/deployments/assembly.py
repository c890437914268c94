"""Puts the graph together: each stage in this process, or a deployment behind a handle."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from app.calls.channels.pool import ChannelPool
from app.calls.remote import RemoteCombiner, RemoteDecoder, RemoteMember, StageHandle
from app.compute.inference_threads import InferenceThreads, replica_inference_threads
from app.decoding.pool import DecodeProcesses, num_processes
from app.deployments.classifier import Classifier
from app.deployments.combiner import Combiner
from app.deployments.decoder import Decoder
from app.graph.ensemble import Ensemble
from app.graph.service import EnsembleService
from app.graph.stages import MemberStage
from app.queueing.node_cores import NodeCores
from app.settings import Settings
from models.cpus import available_cpus
from models.model_set import ModelSet

# A loop that decodes is busy with half of a core at so many images a second: where the networks
# answer more, small photos are decoded elsewhere.
LOOP_IMAGES_PER_S = 250


@dataclass(frozen=True)
class Assembly:
    """The graph, and those of its stages that run in this process."""

    service: EnsembleService
    own_members: tuple[Classifier, ...]
    own_decoder: Decoder | None
    own_combiner: Combiner | None

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a stage of this process fails or hangs."""
        if self.own_decoder is not None:
            await self.own_decoder.check_health()
        for member in self.own_members:
            await member.check_health()
        if self.own_combiner is not None:
            await self.own_combiner.check_health()
        self.service.check_health()


def assemble(
    settings: Settings,
    decoder: StageHandle | None = None,
    members: Mapping[str, StageHandle] | None = None,
    combiner: StageHandle | None = None,
) -> Assembly:
    """Build the graph; a stage without a handle is made in this process, and shares its cores."""
    model_set = settings.load_set()
    own: dict[str, Classifier] = {}
    threads = None if members is not None else replica_inference_threads(settings)
    if threads is not None:
        names = [member.name for member in model_set.manifest.members]
        own = {name: Classifier(settings, name, threads, model_set) for name in names}
    decoding = _decoder(decoder, settings, model_set)
    stages: Mapping[str, MemberStage] = own
    if members is not None:
        stages = _remote_members(members, settings, decoding)
    combining = RemoteCombiner(combiner) if combiner else Combiner(settings, model_set)
    ensemble = Ensemble(settings, model_set, decoding, stages, combining)
    own_decoder = decoding if isinstance(decoding, Decoder) else None
    processes = None
    if threads is not None and own_decoder is not None:
        processes = _place_small_photos(settings, model_set, own_decoder, own, threads)
        threads.scheduler.share_cores_with(own_decoder)
    # Without members of its own a process computes on its one event loop.
    cores = threads.cores if threads is not None else 1
    cpu_s = time.process_time if processes is None else partial(_cpu_s, processes)
    service = EnsembleService(settings, model_set, ensemble, cores, cpu_s)
    own_combiner = combining if isinstance(combining, Combiner) else None
    return Assembly(service, tuple(own.values()), own_decoder, own_combiner)


def _place_small_photos(
    settings: Settings,
    model_set: ModelSet,
    decoder: Decoder,
    members: Mapping[str, Classifier],
    threads: InferenceThreads,
) -> DecodeProcesses | None:
    """Say where small photos are decoded: the loop, processes or threads (DECISIONS.md)."""

    def is_idle() -> bool:
        return all(not one.usage.num_under_way for one in members.values())

    def are_cheap() -> bool:
        image_s = sum(one.image_s for one in members.values()) / threads.num
        return image_s * LOOP_IMAGES_PER_S < 1

    most = threads.cores * max(settings.batch_sizes)

    def has_time() -> bool:
        is_for_loop = not are_cheap() or is_idle()
        return is_for_loop and all(one.num_waiting < most for one in members.values())

    decoder.use_loop(has_time)
    if not (num := num_processes(settings.decode_processes, threads.cores)):
        return None
    rules = model_set.manifest.inputs.rules
    processes = DecodeProcesses(num, rules, settings.max_pixels, settings.max_full_pixels)
    decoder.use_processes(processes, lambda: are_cheap() and not is_idle())
    return processes


def _cpu_s(processes: DecodeProcesses) -> float:
    return time.process_time() + processes.cpu_s


def _decoder(
    handle: StageHandle | None, settings: Settings, model_set: ModelSet
) -> Decoder | RemoteDecoder:
    if handle is None:
        return Decoder(settings, model_set)
    image_bytes, channels = model_set.manifest.inputs.num_bytes, _channels(handle, settings)
    return RemoteDecoder(handle, image_bytes, channels, settings.decode_threads)


def _remote_members(
    handles: Mapping[str, StageHandle], settings: Settings, decoder: Decoder | RemoteDecoder
) -> dict[str, RemoteMember]:
    cores = NodeCores(available_cpus(), decoder)
    return {
        name: RemoteMember(handle, settings.batch_sizes, _channels(handle, settings), cores)
        for name, handle in handles.items()
    }


def _channels(handle: StageHandle, settings: Settings) -> ChannelPool | None:
    if not settings.local_channels:
        return None
    return ChannelPool(handle.app_name, handle.deployment_name)
