"""Binds the graph to deployments: Serve calls :func:`build` with the ``args`` of a configuration.

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

from app.graph.served_models import check_plan, decided
from app.graph.service import answer_timeout_s
from app.oip.regions import regions_of
from app.samples.feedback import FeedbackBook
from app.samples.samples import Erasures, SampleBook, check_sample_store
from app.serve.gateway import Gateway
from app.serve.ray_compatibility import STAGE_ROUTER, check_ray
from app.serve.replica import ClassifierReplica, CombinerReplica, DecoderReplica, Hub
from app.serve.sets import SetBook, SetChanges
from app.setting_values import check_redis_client
from app.settings import Settings
from app.stages.own_functions import check_functions
from app.traffic.control import accuracy_warnings, first_split, loaded_sets
from app.traffic.plan import Plan, TrafficBook
from models.image_colors import check_can_convert
from models.machine import check_installed
from models.model_set import ModelSet
from models.stores import is_url, split_version

LOCALITY_ROUTING = {"request_router_class": "app.serve.locality_router:LocalityRouter"}
logger = logging.getLogger("ray.serve")


def build(settings: Settings) -> Application:
    """Bind the stages; how many replicas each has is serve_config.yaml's business."""
    for warning in check_ray():
        logger.warning(warning)
    answer_timeout_s(settings)  # or it says why not
    check_redis_client(settings.cache)
    check_can_convert(settings.icc_profiles)
    check_sample_store(settings.sample_dir)
    regions_of(is_on=bool(settings.shared_memory))  # the same
    model_sets = loaded_sets(settings)
    settings = in_versions(settings, model_sets)
    settings, why_float = decided(settings, *model_sets)
    if why_float is not None:
        logger.warning(why_float)
    for model_set in model_sets:
        _check(settings, model_set)
    for warning in accuracy_warnings(settings, model_sets):
        logger.warning(warning)
    decoder = members = combiner = None  # in the Gateway's process
    if settings.decoder == "deployment":
        decoder = _bound("Decoder", DecoderReplica, settings)
    if settings.members == "deployment":
        names = [member.name for member in model_sets[0].manifest.members]
        members = {name: _bound(name, ClassifierReplica, settings, name) for name in names}
    if settings.combiner == "deployment":
        combiner = _bound("Combiner", CombinerReplica, settings)
    # Serve's default is 5. Above the Gateway's own limit its answer (429, in JSON) comes first.
    ongoing = 4 * settings.max_concurrent_requests
    deployment = serve.deployment(name="Gateway", max_ongoing_requests=ongoing)
    ingress = deployment(serve.ingress()(Gateway))
    hubs = _hubs(settings, model_sets)
    return ingress.bind(settings, decoder, members, combiner, **hubs)


def _hubs(settings: Settings, model_sets: list[ModelSet]) -> dict[str, Application]:
    """Bind the books that all Gateways share, by the Gateway's argument: a replica each."""
    books: dict[str, object] = {}
    if settings.feedback:
        books["feedback"] = FeedbackBook(settings.feedback_answers)
    if settings.keeps_photographs:
        books["samples"] = SampleBook(Erasures())
    if settings.has_versions:
        plan = Plan.first(first_split(settings, model_sets))
        books["traffic"] = TrafficBook(plan)
    if settings.model_sets is not None:
        books["sets"] = SetBook(SetChanges(",".join(settings.model_sets)))
    return {name: _hub(name.capitalize(), settings, book) for name, book in books.items()}


def _hub(name: str, settings: Settings, book: object) -> Application:
    options = {"num_cpus": 0}  # it takes no core from the others
    deployment = serve.deployment(name=name, max_ongoing_requests=1000, ray_actor_options=options)
    return deployment(Hub).bind(settings, book)


def _check(settings: Settings, model_set: ModelSet) -> None:
    """Refuse to serve a set whose runtime is missing, or that the settings do not fit."""
    manifest = model_set.manifest
    for member in manifest.members:
        precision = member.precision_of(settings.served_precision)
        if (network := member.networks.get(precision)) is not None:
            check_installed(network.runtime, network.runtime, f"member {member.name}")
    check_plan(settings, model_set)
    check_functions(settings, manifest)


def in_versions(settings: Settings, model_sets: list[ModelSet]) -> Settings:
    """Name sets at URLs in these versions: every replica has them, whatever stores have later."""
    each = settings.of_each_version() if settings.has_versions else settings.of_each_set()
    own_names = [own.model_set for own in each]
    if not any(map(is_url, own_names)):
        return settings
    names = [
        f"{split_version(name)[0]}@{of_name.folder.name}" if is_url(name) else name
        for name, of_name in zip(own_names, model_sets, strict=True)
    ]  # a folder of the cache is called by its manifest's hash, whatever weights are set
    update: dict[str, Any] = {"model_set": names[0]}
    if settings.has_several_sets:
        update["model_sets"] = tuple(names)
    if settings.has_versions:
        by_name = dict(zip(own_names, names, strict=True))
        shares = settings.traffic and {by_name[name]: of for name, of in settings.traffic.items()}
        update |= {"traffic": shares, "shadow": settings.shadow and by_name[settings.shadow]}
    return settings.model_copy(update=update)


def _bound(name: str, stage: type, *args: object) -> Application:
    """Bind a stage as a deployment of its own."""
    router = {"request_router_config": LOCALITY_ROUTING} if STAGE_ROUTER.fits() else {}
    options: dict[str, Any] = {"name": name, **router}
    return serve.deployment(**options)(stage).bind(*args)
