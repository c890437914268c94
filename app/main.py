"""The graph, bound: ``serve run serve_config.yaml`` calls :func:`build` with the file's ``args``.

client ─▶ Gateway ─▶ Decoder
             │  ├──▶ resnet50    ─┐  one Classifier per member,
             │  └──▶ densenet169 ─┤  all at the same time
             └─────▶ Combiner ◀───┘

Each stage is a deployment of its own, or shares the Gateway's process: the settings say which.
"""

import logging
from typing import Any

from ray import serve
from ray.serve import Application

from app.calls.ray_compatibility import check_ray
from app.calls.ray_features import STAGE_ROUTER
from app.deployments.gateway import Gateway
from app.deployments.replica import ClassifierReplica, CombinerReplica, DecoderReplica
from app.functions.trial import check_functions
from app.graph.service import answer_timeout_s
from app.graph.set_checks import check_accuracy, check_task
from app.oip.shared_memory import shared_memory_of
from app.precision import decided
from app.setting_values import check_redis_client
from app.settings import Settings
from models.extras import check_installed
from models.record import PACKAGES

LOCALITY_ROUTING = {"request_router_class": "app.calls.locality_router:LocalityRouter"}
logger = logging.getLogger("ray.serve")


def build(settings: Settings) -> Application:
    """Bind the stages; how many replicas each has is serve_config.yaml's business."""
    for warning in check_ray():
        logger.warning(warning)
    answer_timeout_s(settings)  # or it says why not
    check_redis_client(settings.cache)
    shared_memory_of(settings)  # the same
    model_set = settings.load_set()
    settings, why_float = decided(settings, model_set)
    if why_float is not None:
        logger.warning(why_float)
    manifest = model_set.manifest
    for member in manifest.members:
        precision = member.precision_of(settings.served_precision)
        if (network := member.networks.get(precision)) is not None:
            package = PACKAGES[network.runtime]
            check_installed(package, package, f"member {member.name}")
    verdict = check_accuracy(model_set, settings)
    if verdict.status != "verified":
        logger.warning(verdict.message)
    check_task(settings, manifest)
    check_functions(settings, manifest)
    decoder = members = combiner = None  # in the Gateway's process
    if settings.decoder == "deployment":
        decoder = _bound("Decoder", DecoderReplica, settings)
    if settings.members == "deployment":
        names = [member.name for member in manifest.members]
        members = {name: _bound(name, ClassifierReplica, settings, name) for name in names}
    if settings.combiner == "deployment":
        combiner = _bound("Combiner", CombinerReplica, settings)
    # Serve's default is 5. Above the Gateway's own limit its answer (429, in JSON) comes first.
    ongoing = 4 * settings.max_concurrent_requests
    deployment = serve.deployment(name="Gateway", max_ongoing_requests=ongoing)
    ingress = deployment(serve.ingress()(Gateway))
    return ingress.bind(settings, decoder, members, combiner)


def _bound(name: str, stage: type, *args: object) -> Application:
    """Bind a stage as a deployment of its own."""
    router: dict[str, Any] = (
        {"request_router_config": LOCALITY_ROUTING} if STAGE_ROUTER.fits() else {}
    )
    return serve.deployment(name=name, **router)(stage).bind(*args)
