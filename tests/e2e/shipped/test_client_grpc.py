"""tandem_client over gRPC against the real service."""

import pytest

from tandem_client import BadImage, BadRequest, Client
from tandem_client.grpc_client import GrpcClient
from tests.support.services.live_service import Service


def test_it_answers_as_over_http(service: Service, grpc_port: int, photo: bytes) -> None:
    with Client(service.url) as client, GrpcClient(f"127.0.0.1:{grpc_port}") as over_grpc:
        wanted, said = client.classify(photo), over_grpc.classify(photo)
        first, second = over_grpc.classify([photo, b"no image"])
        with pytest.raises(BadRequest, match="ask for 1 to") as caught:
            over_grpc.classify(photo, top_k=9999)
    assert [p.label for p in said.predictions] == [p.label for p in wanted.predictions]
    assert said.probability == pytest.approx(wanted.probability, abs=1e-6)
    assert said.members.keys() == wanted.members.keys()
    assert first.get().label == said.label
    assert isinstance(second.error, BadImage)
    assert caught.value.code == "bad_parameter"
