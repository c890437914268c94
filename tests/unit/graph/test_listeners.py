"""Who hears of answers: of all that a caller got for files, and of nothing else."""

from collections.abc import Sequence

import numpy as np
import pytest

from app.answers import Classified, Fault
from app.graph.observer import RequestObserver
from app.graph.request import ClassifyRequest, TensorRequest
from app.graph.service import EnsembleService
from app.settings import Settings
from app.stages.combiner import Combiner
from tests.support.fakes import FakeDecoder, FakeMember, service_of


class Listener:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[bytes], list[str]]] = []
        self.probabilities: list[np.ndarray | None] = []

    def note(
        self, request_id: str, files: Sequence[bytes], answers: Sequence[Classified | Fault]
    ) -> None:
        kinds = [type(answer).__name__ for answer in answers]
        self.probabilities = [getattr(answer, "probabilities", None) for answer in answers]
        self.heard.append((request_id, list(files), kinds))


@pytest.fixture
def service(tiny_set) -> EnsembleService:
    settings = Settings(model_set=str(tiny_set))
    members = {"sure": FakeMember(), "unsure": FakeMember()}
    return service_of(settings, FakeDecoder(), members, Combiner(settings))


def request(*files: bytes, tensors: TensorRequest | None = None) -> ClassifyRequest:
    return ClassifyRequest(list(files), 1, 10.0, "id", RequestObserver(), tensors=tensors)


async def test_every_file_of_a_request(service: EnsembleService) -> None:
    service.listeners.append(listener := Listener())
    await service.classify(request(b"good", b"bad"))
    assert listener.heard == [("id", [b"good", b"bad"], ["Classified", "Fault"])]
    assert listener.probabilities == [None, None]


async def test_files_by_the_open_inference_protocol(service: EnsembleService) -> None:
    service.listeners.append(listener := Listener())
    await service.classify(request(b"good", tensors=TensorRequest()))
    assert [heard[1:] for heard in listener.heard] == [([b"good"], ["Classified"])]
    assert listener.probabilities[0].shape == (3,)


@pytest.mark.parametrize(
    "tensors", [TensorRequest(np.zeros((1, 2, 2, 3), np.uint8)), TensorRequest(member="sure")]
)
async def test_pixels_and_questions_to_a_member_are_left_out(
    service: EnsembleService, tensors: TensorRequest
) -> None:
    service.listeners.append(listener := Listener())
    files = (b"good",) if tensors.pixels is None else ()
    assert len(await service.classify(request(*files, tensors=tensors))) == 1
    assert listener.heard == []


async def test_labels_are_those_of_each_set(service: EnsembleService) -> None:
    label = service.served_models().labels[0]
    assert service.sets_with(label) == [service.name]
    assert service.sets_with("no such label") == []
