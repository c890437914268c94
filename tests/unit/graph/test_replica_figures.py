"""What each stage tells the autoscaling policy of itself."""

import numpy as np
import pytest

from app.calls.call import InProcess
from app.deployments.classifier import Classifier
from app.deployments.combiner import Combiner
from app.deployments.decoder import Decoder
from app.deployments.gateway import Gateway
from app.errors import OverloadedError
from app.graph.request import ClassifyRequest
from app.graph.timeline import Timeline
from app.main import build
from app.settings import Settings
from tests.support.fakes import FakeCombiner, FakeDecoder, FakeMember
from tests.support.tiny_networks import SIZE, picture


@pytest.fixture
def settings(tiny_set) -> Settings:
    return Settings(model_set=str(tiny_set), compile_cache=None, max_concurrent_requests=1)


def told(stage) -> tuple[float, ...]:
    """Images that arrived, were done, are there."""
    figures = stage.record_autoscaling_stats()
    return tuple(figures[f"images_{what}"] for what in ("arrived", "done", "waiting"))


async def test_every_stage_counts_its_images(settings):
    images = np.zeros((3, SIZE, SIZE, 3), np.uint8)
    decoder, combiner = Decoder(settings), Combiner(settings)
    classifier = Classifier(settings, "sure")
    await decoder.decode([picture(), b"no image"])
    answer = await classifier.classify(images, 10.0)
    await combiner.combine({"sure": answer.probabilities}, 1)
    assert told(decoder) == (2, 2, 0)
    assert told(classifier) == told(combiner) == (3, 3, 0)


async def test_the_gateway_counts_refused_ones_too_and_no_probe(settings):
    members = {"sure": FakeMember((0.1, 0.8, 0.1))}
    gateway = Gateway(settings, FakeDecoder(), members, FakeCombiner())
    with gateway.admission.admit(), pytest.raises(OverloadedError):
        gateway.admission.admit().__enter__()
    await gateway.classify(ClassifyRequest([b"good", b"good"], 1, 10.0, "id", Timeline()))
    await gateway.check_ready()
    assert told(gateway) == (3, 2, 0)


def test_a_gateway_with_all_stages_expects_their_sum(settings):
    members = {name: InProcess(Classifier, (settings, name)) for name in ("sure", "unsure")}
    together = Gateway(settings, Decoder(settings), members, Combiner(settings))
    apart = Settings(**settings.model_dump() | {"decoder": "deployment", "members": "deployment"})
    alone = Gateway(apart, FakeDecoder(), {"sure": FakeMember((0.1, 0.8, 0.1))}, FakeCombiner())
    costs = [g.record_autoscaling_stats()["expected_cpu_ms"] for g in (together, alone)]
    assert costs[0] > 40 > 10 > costs[1]  # two members without a record: 20 each
    assert alone.record_autoscaling_stats()["cores"] == 1


def test_serve_finds_the_figures_of_the_ingress_too(settings):
    """``serve.ingress`` wraps the Gateway: the method must still be there."""
    ingress = build(settings)._bound_deployment.func_or_class
    assert callable(ingress.record_autoscaling_stats)
