"""Shared memory over HTTP: who may use it, its routes, and tensors in it; never a 500."""

import asyncio
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.http.api import create_api
from app.oip.inference import Inference
from tests.support.cases import cases
from tests.support.open_inference import (
    IMAGE,
    LABELS,
    MEAN,
    MODEL,
    Graph,
    client_of,
    drawn,
    elements,
    error_of,
    images,
    infer,
    outputs_of,
    with_header,
)
from tests.support.raw_asgi import Asked, Told, ask
from tests.support.shared_regions import Memory, image_in, in_region

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
REGION = f"{SYSTEM}/region/r"
FILE, HERE = elements(IMAGE), "127.0.0.1"
PIXELS = drawn(2)


@pytest.fixture
def memory(tmp_path) -> Memory:
    return Memory(tmp_path)


@pytest.fixture
def graph() -> Graph:
    return Graph()


@pytest.fixture
def client(graph, memory):
    return client_of(graph, memory.regions)


async def asked_for_regions(client, **headers):
    """Return the answers to everything that has to do with regions."""
    fields = {"key": "k", "byte_size": 1}
    outputs = [{"name": "label", "parameters": in_region(9)}]
    return [
        await client.get(f"{SYSTEM}/status", headers=headers),
        await client.get(f"{REGION}/status", headers=headers),
        await client.post(f"{REGION}/register", json=fields, headers=headers),
        await client.post(f"{REGION}/unregister", headers=headers),
        await client.post(f"{SYSTEM}/unregister", headers=headers),
        await infer(client, image_in(in_region(len(FILE))), **headers),
        await infer(client, images(IMAGE, outputs=outputs), **headers),
    ]


@cases(
    "address, headers, status, says",
    (None, {}, 400, "shared memory is off here; send the data itself"),
    ("10.0.0.7", {}, 403, "on the service's own machine"),
    ("::ffff:10.0.0.7", {}, 403, "on the service's own machine"),
    ("2001:db8::1", {}, 403, "on the service's own machine"),
    (HERE, {"x-forwarded-for": "203.0.113.5"}, 403, "that call it directly"),
    (HERE, {"x-forwarded-for": "127.0.0.1, 203.0.113.5"}, 403, "that call it directly"),
    (HERE, {"x-forwarded-for": "unknown"}, 403, "that call it directly"),
    (HERE, {"forwarded": "for=203.0.113.5"}, 403, "that call it directly"),
    (HERE, {"origin": "https://elsewhere.example"}, 403, "that call it directly"),
)
async def test_who_may_not_use_it(graph, memory, address, headers, status, says):
    """Without an address: where it is off, as by default."""
    memory.region(FILE)
    client = client_of(graph, memory.regions, address) if address else client_of(graph)
    for answer in await asked_for_regions(client, **headers):
        assert says in error_of(answer, status)
    assert len(memory.regions.status()) == 1
    assert (await infer(client, images(IMAGE), **headers)).status_code == 200
    extensions = (await client.get("/v2")).json()["extensions"]
    assert ("system_shared_memory" in extensions) is (address is not None)


async def test_a_proxy_that_asks_for_this_machine_is_believed(client, memory):
    memory.region(FILE)
    answer = await client.get(f"{SYSTEM}/status", headers={"x-forwarded-for": "127.0.0.1, ::1"})
    assert len(answer.json()) == 1


@pytest.mark.parametrize("is_on", [False, True])
async def test_cuda_shared_memory_is_not_supported(graph, memory, is_on):
    client = client_of(graph, memory.regions if is_on else None)
    assert "cuda_shared_memory" not in (await client.get("/v2")).json()["extensions"]
    fields = {"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 64}
    answer = await client.post(f"{CUDA}/region/r/register", json=fields)
    assert "CUDA shared memory is not supported" in error_of(answer, 400)
    for path in (CUDA, f"{CUDA}/region/r"):
        assert (await client.get(f"{path}/status")).json() == []
        assert (await client.post(f"{path}/unregister")).status_code == 200


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
EXAMPLES = settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=SLOW)
NUMBERS = st.integers(-2, 120) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
LISTS = st.lists(st.integers(), max_size=2)
ANY = NUMBERS | st.none() | st.booleans() | st.text(max_size=5) | LISTS
PLACES: dict[str, Any] = {
    "shared_memory_region": st.sampled_from(["in", "out", "other", ""]) | ANY,
    "shared_memory_byte_size": st.sampled_from([len(FILE), 40]) | NUMBERS | ANY,
    "shared_memory_offset": st.just(0) | NUMBERS | ANY,
}
MORE = {"classification": st.just(3), "binary_data": st.booleans()}
PARAMETERS = st.fixed_dictionaries({}, optional=PLACES | MORE)
NAMES = st.sampled_from(["probabilities", "label"])
OUTPUTS = st.lists(
    st.fixed_dictionaries({"name": NAMES}, optional={"parameters": PARAMETERS}), max_size=2
)
REFUSED = {400, 403, 404, 409, 413}
KEYS = st.sampled_from(["k", "/k", "l", "../k", "..", "link", "k\0"])
SIZES = NUMBERS | ANY
REGISTERED = st.fixed_dictionaries(
    {}, optional={"key": KEYS | ANY, "offset": SIZES, "byte_size": SIZES}
)


class Service:
    """The interface of the real service, and its memory, which has two regions."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.memory, graph = Memory(Path(self._folder.name)), Graph()
        (self.memory.folder / "link").symlink_to("k")
        inference = Inference(graph.service, self.memory.regions)
        self.budget = graph.service.byte_budget
        self.api = create_api(graph.service, inference)

    def restored(self) -> "Service":
        """Return it with the regions as they were."""
        self.memory.regions.unregister()
        self.memory.region(FILE, "in", "k")
        self.memory.region(bytes(100), "out", "l")
        return self


@cache
def service() -> Service:
    return Service()


def check(told: Told) -> None:
    assert told.status in REFUSED | {200}, (told.status, told.body)
    if told.status != 200:
        assert list(json.loads(told.body)) == ["error"]


@EXAMPLES
@given(PARAMETERS, OUTPUTS, st.sampled_from([[1], [1, 1], [2], [0]]))
def test_any_parameters_of_tensors(source, outputs, shape):
    tensor = {"name": "image", "datatype": "BYTES", "shape": shape, "parameters": source}
    body, headers = with_header({"inputs": [tensor], "outputs": outputs})
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    asked, path = service().restored(), "/v2/models/imagenette/infer"
    check(ask(asked.api, Asked("POST", path, headers=sent, chunks=[body])))
    assert [(asked.memory.folder / key).stat().st_size for key in ("k", "l")] == [len(FILE), 100]
    assert asked.budget.num_held == 0


@EXAMPLES
@given(st.sampled_from(["in", "mine", "a%2fb", "%00", "ü"]), REGISTERED | ANY)
def test_anything_that_is_to_be_a_region(name: str, fields: Any) -> None:
    path = f"/v2/systemsharedmemory/region/{name}"
    api = service().restored().api
    check(ask(api, Asked("POST", f"{path}/register", chunks=[json.dumps(fields).encode()])))
    check(ask(api, Asked("GET", f"{path}/status")))
    check(ask(api, Asked("POST", f"{path}/unregister")))
    check(ask(api, Asked("GET", "/v2/systemsharedmemory/status")))


def output_in(name: str, byte_size: int, region: str = "out", offset: int | None = None):
    return {"name": name, "parameters": in_region(byte_size, region, offset)}


async def begun(graph, client, sent):
    """Return the task of a request that is being computed, and the gate that it waits at."""
    gate = graph.members["resnet50"].gate = asyncio.Event()
    task = asyncio.create_task(infer(client, sent))
    while not graph.members["resnet50"].asked:
        await asyncio.sleep(0)
    return task, gate


async def test_regions_are_registered_described_and_forgotten(client, memory):
    memory.file("k", bytes(100))
    region = {"key": "/k", "offset": 5, "byte_size": 90}
    answer = await client.post(f"{REGION}/register", json=region)
    assert (answer.status_code, answer.content) == (200, b"")
    for place in (REGION, SYSTEM):
        assert (await client.get(f"{place}/status")).json() == [{"name": "r"} | region]
    await client.post(f"{SYSTEM}/region/a%20b/register", json={"key": "k", "byte_size": 9})
    assert len((await client.get(f"{SYSTEM}/status")).json()) == 2
    assert (await client.post(f"{REGION}/unregister")).status_code == 200
    assert "not registered" in error_of(await client.get(f"{REGION}/status"), 404)
    assert (await client.post(f"{SYSTEM}/unregister")).status_code == 200
    assert (await client.get(f"{SYSTEM}/status")).json() == []


@cases(
    "data, shape, more",
    (elements(IMAGE, IMAGE), [2], {}),
    (PIXELS.tobytes(), list(PIXELS.shape), {"name": "pixels", "datatype": "UINT8"}),
    ids=["image", "pixels"],
)
async def test_inputs_and_outputs_in_regions(client, memory, data, shape, more):
    memory.region(b"before" + data + b"after", "in", "a")
    place = memory.region(bytes(200), "out", "b")
    outputs = [output_in("probabilities", 80, offset=8), output_in("label", 100, offset=100)]
    answer = await infer(client, image_in(in_region(len(data), "in", 6), shape, outputs, **more))
    assert answer.status_code == 200, answer.text
    rows, names = answer.json()["outputs"]
    label = elements(*[LABELS[1].encode()] * 2)
    described = {"name": "probabilities", "datatype": "FP32", "shape": [2, 10]}
    assert rows == {**described, "parameters": in_region(80, "out", 8)}
    assert names["parameters"] == in_region(len(label), "out", 100)
    assert "data" not in names
    written = place.read_bytes()
    assert np.frombuffer(written[8:88], "<f4") == pytest.approx(np.tile(MEAN, 2), abs=1e-7)
    assert written[100:] == label + bytes(100 - len(label))
    assert written[:8] + written[88:100] == bytes(20)


async def test_one_of_both_may_be_in_a_region(client, memory):
    memory.region(FILE)
    assert outputs_of(await infer(client, image_in(in_region(len(FILE)))))["label"] == [LABELS[1]]
    place = memory.region(bytes(40), "out", "b")
    outputs = [{"name": "label"}, output_in("probabilities", 40)]
    answer = await infer(client, images(IMAGE, outputs=outputs))
    assert answer.json()["outputs"][0]["data"] == [LABELS[1]]
    assert np.frombuffer(place.read_bytes(), "<f4") == pytest.approx(MEAN, abs=1e-7)


async def test_bytes_in_regions_count_until_the_answer_as_a_bodys_do(graph, client, memory):
    data = elements(*[IMAGE + bytes(1000)] * 2)
    memory.region(data)
    budget, sent = graph.service.byte_budget, image_in(in_region(len(data)), [2])
    task, gate = await begun(graph, client, sent)
    assert budget.num_held == len(data) + len(sent[0])
    gate.set()
    assert (await task).status_code == 200
    assert budget.num_held == 0


async def test_more_than_a_body_may_have_is_refused_before_it_is_read(client, memory):
    with (memory.folder / "k").open("wb") as file:
        file.truncate(2**40)
    memory.regions.register("r", "k", 0, 2**40)
    assert "the limit is 500000" in error_of(await infer(client, image_in(in_region(2**40))), 413)


def image_out(byte_size: int, region: str = "out", name: str = "probabilities", **place: int):
    """Return a request whose output goes into a region."""
    return images(IMAGE, outputs=[output_in(name, byte_size, region, **place)])


@cases(
    "sent, status, says",
    (image_in(in_region(len(FILE), "other")), 404, "'other' is not registered; register it"),
    (image_in(in_region(len(FILE) + 1)), 400, "are asked for"),
    (image_in(in_region(len(FILE), offset=1)), 400, "are asked for"),
    (image_in(in_region(2**63 - 1)), 413, "the limit is 500000"),
    (image_in(in_region(len(FILE) - 1)), 400, "has 10 bytes by its length, and 9 are left"),
    (image_in(in_region(3)), 400, "shape and data must agree"),
    (image_in(in_region(0)), 400, "give a size from 1"),
    (image_out(39), 400, "has 40 bytes, and 39 of shared memory"),
    (image_out(40, "other"), 404, "'other' is not registered"),
    (image_out(41), 400, "are asked for"),
    (image_out(1, name="label", offset=40), 400, "are asked for"),
)
async def test_what_no_region_has_or_takes(graph, client, memory, sent, status, says):
    """It is refused before anything is computed."""
    memory.region(FILE)
    memory.region(bytes(40), "out", "out")
    assert says in error_of(await infer(client, sent), status)
    assert (graph.decoder.lanes, graph.service.byte_budget.num_held) == ([], 0)
    assert (await infer(client, image_in(in_region(len(FILE))))).status_code == 200


async def test_a_label_longer_than_its_place(client, memory):
    place = memory.region(bytes(40), "out")
    answer = await infer(client, images(IMAGE, outputs=[output_in("label", 5)]))
    assert "and 5 are given to it in region 'out'" in error_of(answer, 400)
    assert place.read_bytes() == bytes(40)
    stats = (await client.get(f"{MODEL}/stats")).json()["model_stats"][0]["inference_stats"]
    assert (stats["success"]["count"], stats["fail"]["count"]) == (0, 1)


@cases(
    "happens, status, says",
    (lambda memory, place: place.unlink(), 400, "No such file"),
    (lambda memory, place: os.truncate(place, 39), 400, "has 39 bytes, and it needs 40"),
    (lambda memory, place: memory.regions.unregister("out"), 404, "not registered"),
)
async def test_a_region_that_goes_meanwhile(graph, client, memory, happens, status, says):
    place = memory.region(bytes(40), "out")
    task, gate = await begun(graph, client, images(IMAGE, outputs=[output_in("probabilities", 40)]))
    happens(memory, place)
    gate.set()
    assert says in error_of(await task, status)
    assert (await infer(client, images(IMAGE))).status_code == 200


@cases(
    "body, status, says",
    (b"", 400, "is no JSON"),
    (b"{", 400, "is no JSON"),
    (b"[]", 400, "is no object"),
    (b"{}", 400, "key is None"),
    ({"byte_size": None}, 400, "byte_size is None"),
    ({"key": "../k"}, 400, "without slashes"),
    ({"key": "link"}, 400, "symbolic links"),
    ({"byte_size": 101}, 400, "has 100 bytes, and it needs 101"),
    ({"byte_size": 100, "offset": 1}, 400, "has 100 bytes, and it needs 101"),
    ({"offset": 100}, 400, "it needs 101"),
    ({"byte_size": -1}, 400, "byte_size is -1"),
    ({"byte_size": 0}, 400, "byte_size is 0"),
    ({"byte_size": 2**63 - 1, "offset": 2**63 - 1}, 400, "it needs 18446744073709551614"),
    ({"byte_size": 2**63}, 400, "byte_size is 9223372036854775808"),
    ({"byte_size": 2**70}, 400, "byte_size is 1.18"),
    ({"offset": 2**63}, 400, "offset is 9223372036854775808"),
    ({"offset": -1}, 400, "offset is -1"),
    ({"offset": None}, 400, "offset is None"),
    ({"offset": "0"}, 400, "offset is '0'"),
    ({"offset": 0.0}, 400, "offset is 0.0"),
    ({"offset": False, "byte_size": True}, 400, "offset is False"),
    (b" " * 70_000, 413, "the limit is 65536"),
)
async def test_what_cannot_be_registered(client, memory, body, status, says):
    """An object is of what differs from a region that can."""
    memory.file("k", bytes(100))
    (memory.folder / "link").symlink_to("k")
    if isinstance(body, dict):
        body = json.dumps({"key": "k", "byte_size": 1} | body)
    assert says in error_of(await client.post(f"{REGION}/register", content=body), status)
    assert (await client.get(f"{SYSTEM}/status")).json() == []


async def test_registering_twice(client, memory):
    memory.region(FILE)
    answer = await client.post(f"{REGION}/register", json={"key": "k", "byte_size": 1})
    assert "'r' is registered already; unregister it first" in error_of(answer, 409)
    (region,) = (await client.get(f"{REGION}/status")).json()
    assert region["byte_size"] == len(FILE)
    assert len(list(memory.entries.iterdir())) == 1


async def test_files_that_change_all_the_time_never_end_the_process(client, memory):
    """Whatever a client does to its memory meanwhile, others are served."""
    place = memory.region(FILE + bytes(40))
    sent = image_in(in_region(len(FILE)), outputs=[output_in("probabilities", 40, "r", len(FILE))])
    whole, sizes = FILE + bytes(40), (0, 1, len(FILE), len(FILE) + 39)
    for number in range(40):
        task = asyncio.create_task(infer(client, sent))
        for _ in range(number):
            await asyncio.sleep(0)
        os.truncate(place, sizes[number % 4])
        assert (await task).status_code in (200, 400)
        place.write_bytes(whole)
        assert (await infer(client, sent)).status_code == 200
