"""The graph, bound: ``serve run serve_config.yaml`` calls :func:`build` with the file's ``args``.

client ─▶ Gateway ─▶ Decoder
             │  ├──▶ resnet50    ─┐  one Classifier per member,
             │  └──▶ densenet169 ─┤  all at the same time
             └─────▶ Combiner ◀───┘

Each stage is a deployment of its own, or shares the Gateway's process: the settings say which.
"""

import logging

from ray import serve
from ray.serve import Application

from app.accuracy_gate import check_accuracy
from app.calls.call import InProcess
from app.calls.ray_compatibility import check_ray
from app.deployments.classifier import Classifier
from app.deployments.combiner import Combiner
from app.deployments.decoder import Decoder
from app.deployments.gateway import Gateway
from app.environment import answer_timeout_s
from app.settings import Place, Settings
from models.model_set import load_model_set

LOCALITY_ROUTING = {"request_router_class": "app.calls.locality_router:LocalityRouter"}
logger = logging.getLogger("ray.serve")


def build(settings: Settings) -> Application:
    """Bind the stages; how many replicas each has is serve_config.yaml's business."""
    check_ray()
    answer_timeout_s(settings.answer_timeout_s, settings.request_timeout_s)  # or it says why not
    manifest = load_model_set(settings.model_set, settings.model_search).manifest
    verdict = check_accuracy(manifest, settings)
    if verdict.status != "verified":
        logger.warning(verdict.message)
    decoder = _placed(settings.decoder, "Decoder", Decoder, settings)
    members = {
        member.name: _placed(settings.members, member.name, Classifier, settings, member.name)
        for member in manifest.members
    }
    combiner = _placed(settings.combiner, "Combiner", Combiner, settings)
    ingress = serve.deployment(name="Gateway")(serve.ingress()(Gateway))
    return ingress.bind(settings, decoder, members, combiner)


def _placed(place: Place, name: str, stage: type, *args: object) -> Application | InProcess:
    """Return a stage as a deployment of its own, or for the Gateway to make in its process."""
    if place == "gateway":
        return InProcess(stage, args)
    return serve.deployment(name=name, request_router_config=LOCALITY_ROUTING)(stage).bind(*args)
