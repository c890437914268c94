"""Puts the graph together: each stage in this process, or a deployment behind a handle."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from app.calls.channels.frames import IS_THERE
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

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Assembly:
    """The graph, and those of its stages that run in this process."""

    service: EnsembleService
    own_members: tuple[Classifier, ...]
    others: tuple[Decoder | Combiner, ...]

    async def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a stage of this process fails or hangs."""
        for stage in (*self.own_members, *self.others):
            await stage.check_health()
        self.service.check_health()


def assemble(
    settings: Settings,
    decoder: StageHandle | None = None,
    members: Mapping[str, StageHandle] | None = None,
    combiner: StageHandle | None = None,
) -> Assembly:
    """Build the graph; a stage without a handle is made in this process, and shares its cores."""
    model_set = settings.load_set()
    logger.info("serving model set %s, %s", model_set.name, settings.served_precision)
    own: dict[str, Classifier] = {}
    threads = None if members is not None else replica_inference_threads(settings)
    if threads is not None:
        names = [member.name for member in model_set.manifest.members]
        own = {name: Classifier(settings, name, threads, model_set) for name in names}
    stages: Mapping[str, MemberStage] = own
    if members is not None:
        sizes = settings.batch_sizes
        stages = {
            name: RemoteMember(handle, sizes, _channels(handle, settings))
            for name, handle in members.items()
        }
    decoding: Decoder | RemoteDecoder
    if decoder is None:
        decoding = Decoder(settings, model_set, tuple(own.values()))
        if threads is not None:
            threads.scheduler.share_cores_with(decoding)
    else:
        image_bytes = model_set.manifest.inputs.num_bytes
        decoding = RemoteDecoder(decoder, image_bytes, _channels(decoder, settings))
    combining = RemoteCombiner(combiner) if combiner else Combiner(settings, model_set)
    ensemble = Ensemble(settings, model_set, decoding, stages, combining)
    # Without members of its own a process computes on its one event loop.
    cores = threads.cores if threads is not None else 1
    service = EnsembleService(settings, model_set, ensemble, cores)
    others = tuple(s for s in (decoding, combining) if isinstance(s, Decoder | Combiner))
    return Assembly(service, tuple(own.values()), others)


def _channels(handle: StageHandle, settings: Settings) -> ChannelPool | None:
    if not (settings.local_channels and IS_THERE):
        return None
    return ChannelPool(handle.app_name, handle.deployment_name)
