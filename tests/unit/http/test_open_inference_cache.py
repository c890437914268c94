"""The response cache under /v2: files are answered from it, whichever way they came first."""

import pytest

from tests.support.open_inference import (
    IMAGE,
    LABELS,
    MEAN,
    MODEL,
    Graph,
    client_of,
    drawn,
    images,
    infer,
    outputs_of,
    pixels,
)

OTHER = IMAGE + b" of another"


@pytest.fixture
def graph() -> Graph:
    return Graph(cache="local")


@pytest.fixture
def client(graph):
    return client_of(graph)


def num_asked(graph: Graph) -> int:
    return sum(map(len, graph.members["resnet50"].seen))


async def test_a_hit_is_what_was_computed(graph, client):
    computed = await infer(client, images(IMAGE))
    hit = await infer(client, images(IMAGE))
    assert num_asked(graph) == 1
    assert computed.json()["parameters"] == {"sure": False}
    assert hit.json()["parameters"] == {"sure": False, "cached": True}
    assert outputs_of(hit) == outputs_of(computed)
    assert outputs_of(hit)["probabilities"] == pytest.approx(MEAN.tolist(), abs=1e-7)


async def test_v1_and_v2_have_one_cache(graph, client):
    await client.post("/v1/classify", content=IMAGE)
    answer = await infer(client, images(IMAGE))
    assert num_asked(graph) == 1
    assert outputs_of(answer)["label"] == [LABELS[1]]
    await infer(client, images(OTHER))
    over_v1 = await client.post("/v1/classify", content=OTHER)
    assert over_v1.json()["cached"] is True


async def test_a_request_that_is_a_hit_in_part_is_not_called_one(graph, client):
    await infer(client, images(IMAGE))
    answer = await infer(client, images(OTHER, IMAGE))
    assert answer.json()["parameters"] == {"sure": False}
    assert len(outputs_of(answer)["label"]) == 2
    assert num_asked(graph) == 2


@pytest.mark.parametrize("control", ["no-cache", "no-store"])
async def test_the_client_may_have_it_computed(graph, client, control):
    await infer(client, images(IMAGE))
    answer = await infer(client, images(IMAGE), **{"cache-control": control})
    assert answer.json()["parameters"] == {"sure": False}
    assert num_asked(graph) == 2


async def test_pixels_and_members_alone_are_computed(graph, client):
    for _ in range(2):
        await infer(client, pixels(drawn()))
        await infer(client, images(IMAGE), path=f"{MODEL}.resnet50")
    assert num_asked(graph) == 4


async def test_statistics_tell_hits_from_misses(client):
    for _ in range(3):
        await infer(client, images(IMAGE))
    (model,) = (await client.get(f"{MODEL}/stats")).json()["model_stats"]
    told = {name: model["inference_stats"][name]["count"] for name in ("cache_hit", "cache_miss")}
    assert told == {"cache_hit": 2, "cache_miss": 1}
    assert (model["inference_count"], model["execution_count"]) == (3, 1)
