"""The graph, bound: ``serve run serve_config.yaml`` calls :func:`build` with the file's ``args``.

client ─▶ Gateway ─▶ Decoder
             │  ├──▶ resnet50    ─┐  one Classifier per member,
             │  └──▶ densenet169 ─┤  all at the same time
             └─────▶ Combiner ◀───┘
"""

import logging

from ray import serve
from ray.serve import Application

from app.classifier import Classifier
from app.combiner import Combiner
from app.decoder import Decoder
from app.gateway import Gateway
from app.ledger import check_ledger
from app.settings import Settings
from models.model_set import load_model_set

logger = logging.getLogger("ray.serve")


def build(settings: Settings) -> Application:
    """Bind the stages; how many replicas each has is serve_config.yaml's business."""
    manifest = load_model_set(settings.model_set, settings.model_search).manifest
    verdict = check_ledger(manifest, settings)
    if verdict.status != "verified":
        logger.warning(verdict.message)
    decoder = serve.deployment(name="Decoder")(Decoder).bind(settings)
    members = {
        member.name: serve.deployment(name=member.name)(Classifier).bind(settings, member.name)
        for member in manifest.members
    }
    combiner: Combiner | Application = Combiner(settings)
    if settings.combiner == "deployment":
        combiner = serve.deployment(name="Combiner")(Combiner).bind(settings)
    ingress = serve.deployment(name="Gateway")(serve.ingress()(Gateway))
    return ingress.bind(settings, decoder, members, combiner)
