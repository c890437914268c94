"""Puts the graph together: each stage in this process, or a deployment behind a handle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.calls.channels.pool import ChannelPool
from app.calls.remote import RemoteCombiner, RemoteDecoder, RemoteMember, StageHandle
from app.compute.inference_threads import replica_inference_threads
from app.deployments.classifier import Classifier
from app.deployments.combiner import Combiner
from app.deployments.decoder import Decoder
from app.graph.ensemble import Ensemble
from app.graph.service import EnsembleService
from app.graph.stages import MemberStage
from app.settings import Settings
from models.model_set import ModelSet


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
    decoding = _decoder(decoder, settings, model_set, tuple(own.values()))
    stages: Mapping[str, MemberStage] = own
    if members is not None:
        stages = _remote_members(members, settings)
    combining = RemoteCombiner(combiner) if combiner else Combiner(settings, model_set)
    ensemble = Ensemble(settings, model_set, decoding, stages, combining)
    own_decoder = decoding if isinstance(decoding, Decoder) else None
    if threads is not None and own_decoder is not None:
        threads.scheduler.share_cores_with(own_decoder)
    # Without members of its own a process computes on its one event loop.
    cores = threads.cores if threads is not None else 1
    service = EnsembleService(settings, model_set, ensemble, cores)
    own_combiner = combining if isinstance(combining, Combiner) else None
    return Assembly(service, tuple(own.values()), own_decoder, own_combiner)


def _decoder(
    handle: StageHandle | None,
    settings: Settings,
    model_set: ModelSet,
    members: Sequence[Classifier],
) -> Decoder | RemoteDecoder:
    if handle is None:
        return Decoder(settings, model_set, members)
    image_bytes = model_set.manifest.inputs.num_bytes
    return RemoteDecoder(handle, image_bytes, _channels(handle, settings))


def _remote_members(
    handles: Mapping[str, StageHandle], settings: Settings
) -> dict[str, RemoteMember]:
    return {
        name: RemoteMember(handle, settings.batch_sizes, _channels(handle, settings))
        for name, handle in handles.items()
    }


def _channels(handle: StageHandle, settings: Settings) -> ChannelPool | None:
    if not settings.local_channels:
        return None
    return ChannelPool(handle.app_name, handle.deployment_name)
