"""The real service of a multi-label set made in code, in this process."""

from app.graph.service import EnsembleService
from app.settings import Settings
from app.stages.classifier import Classifier
from app.stages.combiner import Combiner
from app.stages.decoder import Decoder
from tests.support.fakes import service_of
from tests.support.scored_sets import GAINS


def scored_service(folder: str, *, as_handles: bool = False, **more: object) -> EnsembleService:
    """Return the service of a set that :func:`write_scored_set` wrote; ``more`` are settings."""
    settings = Settings(model_set=folder, trace_exporter="none", compile_cache=None, **more)
    members = {name: Classifier(settings, name) for name in GAINS}
    return service_of(
        settings, Decoder(settings), members, Combiner(settings), as_handles=as_handles
    )
