"""What each stage tells the autoscaling policy of itself."""

import asyncio

import numpy as np
import pytest

from app.errors import DeadlineError, OverloadedError
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest
from app.main import build
from app.queueing.usage import Usage
from app.serve.gateway import assemble
from app.serve.replica import ClassifierReplica, CombinerReplica, DecoderReplica
from app.settings import Settings
from tests.support.fakes import FakeCombiner, FakeDecoder, FakeMember, handle_of, service_of
from tests.support.tiny_networks import SIZE, picture


@pytest.fixture
def settings(tiny_set) -> Settings:
    return Settings(model_set=str(tiny_set), compile_cache=None, max_concurrent_requests=1)


def told(usage: Usage) -> tuple[float, ...]:
    """Images that arrived, were done, are there."""
    figures = usage.figures()
    return tuple(figures[f"images_{what}"] for what in ("arrived", "done", "waiting"))


async def test_every_stage_counts_its_images(settings):
    images = np.zeros((3, SIZE, SIZE, 3), np.uint8)
    decoder, combiner = DecoderReplica(settings), CombinerReplica(settings)
    classifier = ClassifierReplica(settings, "sure")
    await decoder.decode([picture(), b"no image"])
    answer = await classifier.classify(images, 10.0)
    await combiner.combine({"sure": answer.probabilities}, 1)
    assert told(decoder.usage) == (2, 2, 0)
    assert told(classifier.usage) == told(combiner.usage) == (3, 3, 0)
    for replica in (decoder, classifier, combiner):
        assert replica.record_autoscaling_stats() == pytest.approx(replica.usage.figures(), rel=0.1)


async def test_the_gateway_counts_refused_ones_too_and_no_probe(settings):
    members = {"sure": FakeMember((0.1, 0.8, 0.1))}
    service = service_of(settings, FakeDecoder(), members, FakeCombiner())
    with service.admission.admit(), pytest.raises(OverloadedError):
        service.admission.admit().__enter__()
    await service.classify(ClassifyRequest([b"good", b"good"], 1, 10.0, "id", RequestObserver()))
    await service.check_ready()
    assert told(service.usage) == (3, 2, 0)


async def test_a_refused_form_counts_as_many_images_as_those_before_it(settings):
    members = {"sure": FakeMember((0.1, 0.8, 0.1))}
    service = service_of(settings, FakeDecoder(), members, FakeCombiner())
    for _ in range(200):
        with service.admission.admit():
            service.admission.holds(64)
    with service.admission.admit(), pytest.raises(OverloadedError):
        service.admission.admit().__enter__()
    assert told(service.usage)[0] == pytest.approx(64, rel=0.01)


async def test_a_forwarded_request_is_admitted_counted_and_timed_as_any_other(settings):
    member = FakeMember((0.1, 0.8, 0.1))
    service = service_of(settings, FakeDecoder(), {"sure": member}, FakeCombiner())
    request = ClassifyRequest([b"good", b"good"], 1, 0.05, "id", RequestObserver())
    answers = await service.handle_forwarded(request.forwarded())
    assert len(answers) == 2
    assert told(service.usage) == (2, 2, 0)
    with service.admission.admit(), pytest.raises(OverloadedError):
        await service.handle_forwarded(request.forwarded())
    member.gate = asyncio.Event()  # it hangs
    with pytest.raises(DeadlineError):
        await service.handle_forwarded(request.forwarded())
    assert told(service.usage)[2] == 0


def test_a_gateway_with_all_stages_expects_their_sum(settings):
    together = assemble(settings).service
    apart = Settings(**settings.model_dump() | {"decoder": "deployment", "members": "deployment"})
    alone = assemble(apart, handle_of(FakeDecoder()), {"sure": handle_of(FakeMember())}).service
    costs = [service.usage.figures()["expected_cpu_ms"] for service in (together, alone)]
    assert costs[0] > 40 > 10 > costs[1]  # two members without a record: 20 each
    assert alone.usage.figures()["cores"] == 1


def test_serve_finds_the_figures_of_the_ingress_too(settings):
    """``serve.ingress`` wraps the Gateway: the method must still be there."""
    ingress = build(settings)._bound_deployment.func_or_class
    assert callable(ingress.record_autoscaling_stats)
