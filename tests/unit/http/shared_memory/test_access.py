"""Shared memory over HTTP: where it is on, and who may use it."""

import pytest

from tests.support.open_inference import (
    IMAGE,
    client_of,
    elements,
    error_of,
    images,
    infer,
)
from tests.support.shared_regions import image_in, in_region

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
REGION = f"{SYSTEM}/region/r"
FILE = elements(IMAGE)


async def asked_for_regions(client, **headers):
    """Return the answers to everything that has to do with regions."""
    fields = {"key": "k", "byte_size": 1}
    return [
        await client.get(f"{SYSTEM}/status", headers=headers),
        await client.get(f"{REGION}/status", headers=headers),
        await client.post(f"{REGION}/register", json=fields, headers=headers),
        await client.post(f"{REGION}/unregister", headers=headers),
        await client.post(f"{SYSTEM}/unregister", headers=headers),
        await infer(client, image_in(in_region(len(FILE))), **headers),
        await infer(
            client,
            images(IMAGE, outputs=[{"name": "label", "parameters": in_region(9)}]),
            **headers,
        ),
    ]


async def test_it_is_off_by_default(graph):
    client = client_of(graph)
    for answer in await asked_for_regions(client):
        assert "shared memory is off here; send the data itself" in error_of(answer, 400)
    assert "system_shared_memory" not in (await client.get("/v2")).json()["extensions"]


async def test_the_extension_is_named_where_it_is_on(client):
    extensions = (await client.get("/v2")).json()["extensions"]
    assert "system_shared_memory" in extensions
    assert "cuda_shared_memory" not in extensions


@pytest.mark.parametrize("address", ["10.0.0.7", "::ffff:10.0.0.7", "2001:db8::1"])
async def test_callers_elsewhere_are_refused(graph, memory, address):
    memory.region(FILE)
    client = client_of(graph, memory.regions, address)
    for answer in await asked_for_regions(client):
        assert "on the service's own machine" in error_of(answer, 403)
    assert len(memory.regions.status()) == 1
    assert (await infer(client, images(IMAGE))).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "203.0.113.5"},
        {"x-forwarded-for": "127.0.0.1, 203.0.113.5"},
        {"x-forwarded-for": "unknown"},
        {"forwarded": "for=203.0.113.5"},
        {"origin": "https://elsewhere.example"},
    ],
)
async def test_what_others_ask_by_way_of_a_program_here_is_refused(client, memory, headers):
    memory.region(FILE)
    for answer in await asked_for_regions(client, **headers):
        assert "that call it directly" in error_of(answer, 403)
    assert (await infer(client, images(IMAGE), **headers)).status_code == 200


async def test_a_proxy_that_asks_for_this_machine_is_believed(client, memory):
    memory.region(FILE)
    answer = await client.get(f"{SYSTEM}/status", headers={"x-forwarded-for": "127.0.0.1, ::1"})
    assert len(answer.json()) == 1


@pytest.mark.parametrize("is_on", [False, True])
async def test_cuda_shared_memory_is_not_supported(graph, memory, is_on):
    client = client_of(graph, memory.regions if is_on else None)
    fields = {"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 64}
    answer = await client.post(f"{CUDA}/region/r/register", json=fields)
    assert "CUDA shared memory is not supported" in error_of(answer, 400)
    for path in (f"{CUDA}/status", f"{CUDA}/region/r/status"):
        assert (await client.get(path)).json() == []
    for path in (f"{CUDA}/unregister", f"{CUDA}/region/r/unregister"):
        assert (await client.post(path)).status_code == 200
