"""Sets that are loaded and unloaded while the service runs, through HTTP."""

import asyncio
import logging
import shutil
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.errors import ConfigError
from app.graph.availability import OnDemandGraph
from app.graph.served_models import served_sets
from app.http.api import create_api
from app.oip.inference import Inference
from app.serve import set_stages
from app.serve.gateway import Assembly, assemble
from app.serve.set_stages import SetStages
from app.serve.sets import ServedSets
from app.settings import Settings
from calibration.sets.transaction import write_manifest
from models.manifest import read_manifest
from models.model_set import ModelSet
from tests.support.cases import cases
from tests.support.open_inference import binary_request, elements, outputs_of
from tests.support.several_sets import FIRST, SECOND, THIRD, labels_of, three_sets
from tests.support.steps import settle
from tests.support.tiny_networks import picture, write_tiny_set

KEY = "k" * 32
AUTHORISED = {"authorization": f"Bearer {KEY}"}
MODELS, REPOSITORY_INDEX = "/v2/repository/models", "/v2/repository/index"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return three_sets(tmp_path)


@pytest.fixture
def folders(settings: Settings) -> tuple[str, str]:
    assert settings.model_sets is not None
    first, second = settings.model_sets
    return first, second


@pytest.fixture
def graph(settings, monkeypatch) -> Assembly:
    monkeypatch.setenv("TANDEM_API_KEYS", KEY)
    return assemble(settings)


@pytest.fixture
async def client(graph) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(graph) as client:
        yield client


def client_of(graph: Assembly, headers: dict[str, str] = AUTHORISED) -> httpx.AsyncClient:
    api = create_api(graph.service, Inference(graph.service, loader=graph.sets))
    transport = httpx.ASGITransport(api)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


async def classified(client: httpx.AsyncClient, name: str, color: str = "red") -> httpx.Response:
    query = {"model_set": name}
    return await client.post("/v1/classify", params=query, content=picture(color))


async def states(client: httpx.AsyncClient, **body: object) -> dict[str, str]:
    index = (await client.post("/v2/repository/index", json=body)).json()
    return {entry["name"]: entry["state"] for entry in index}


async def changed(client: httpx.AsyncClient, call: str, name: str, **options: Any) -> int:
    """Load or unload a set by its name; return the status."""
    return (await client.post(f"{MODELS}/{name}/{call}", **options)).status_code


@pytest.fixture
def held(graph, monkeypatch) -> tuple[threading.Event, list[threading.Thread]]:
    """Have each set wait to be built until the event; the threads on which they were."""
    may_build, threads = threading.Event(), []
    build = graph.stages.build

    def slow(*args: object) -> object:
        threads.append(threading.current_thread())
        may_build.wait()
        return build(*args)

    monkeypatch.setattr(graph.stages, "build", slow)
    return may_build, threads


def graph_of(sets: ServedSets, name: str) -> OnDemandGraph:
    return sets._graphs[name]


async def let_idle_go(graph: Assembly) -> None:
    """Let the second set's minute pass, and Serve ask after the health."""
    of_set = graph_of(graph.sets, SECOND)
    of_set._asked_at -= 60
    await graph.check_health()
    unloading = of_set._unloading
    assert unloading
    await unloading


async def test_a_set_that_nobody_asks_for_is_let_go_and_loaded_when_asked(graph, client):
    network = weakref.ref(graph.stages.members[-1]._network)
    await graph.check_health()
    assert network() is not None
    await let_idle_go(graph)
    assert network() is None
    assert [member._name for member in graph.stages.members] == ["sure", "unsure"]
    for path in ("/readyz", "/v2/health/ready", f"/v2/models/{SECOND}/ready"):
        assert (await client.get(path)).status_code == 200
    assert network() is None  # a probe loads nothing
    index = (await client.post("/v2/repository/index")).json()
    assert {entry["state"] for entry in index} == {"READY"}
    reasons = [entry["reason"] for entry in index if entry["reason"]]
    assert reasons == ["not in memory; the next request has it loaded"] * 2
    described = (await client.get("/v1/models")).json()
    assert described["model_sets"] == described["models"] == [FIRST, SECOND]
    answer = await classified(client, SECOND)
    assert answer.json()["predictions"][0]["label"] == labels_of("red")[SECOND]
    assert len(graph.stages.members) == 3


async def test_the_default_set_stays_however_long_nobody_asks_and_is_not_unloaded(graph, client):
    for of_set in graph.sets._graphs.values():
        of_set._asked_at -= 1e9
    await graph.check_health()
    await settle()
    assert FIRST not in graph.sets._graphs
    refused = await client.post(f"{MODELS}/{FIRST}/unload")
    assert refused.status_code == 422
    assert "the default set" in refused.json()["error"]
    assert (await classified(client, FIRST)).status_code == 200


async def test_other_requests_are_answered_while_a_set_is_loaded(graph, client, held):
    """The load waits for the other set's answers: were these to wait for it, nothing would end."""
    may_build, built = held
    await let_idle_go(graph)
    waiting = [asyncio.create_task(classified(client, SECOND)) for _ in range(4)]
    for _ in range(5):
        assert (await classified(client, FIRST)).status_code == 200
    assert not any(task.done() for task in waiting)
    may_build.set()
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 4
    (thread,) = built
    assert thread is not threading.main_thread()


async def test_who_cannot_wait_for_a_load_is_answered_503_with_retry_after(graph, client, held):
    await let_idle_go(graph)
    hasty = {"x-request-timeout-seconds": "0.5"}
    query = {"model_set": SECOND}
    answer = await client.post("/v1/classify", params=query, content=picture(), headers=hasty)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"].startswith("loading the model set 'other' takes")
    held[0].set()
    assert (await classified(client, SECOND)).status_code == 200


async def test_a_set_whose_file_broke_fails_alone(graph, client, folders):
    await let_idle_go(graph)
    network = next(Path(folders[1]).rglob("*.bin"))
    whole = network.read_bytes()
    network.write_bytes(whole[:-1])
    answer = await classified(client, SECOND)
    assert answer.status_code == 503
    assert "cannot be loaded; the service's log says why" in answer.json()["error"]["message"]
    assert str(network) not in answer.text
    assert (await classified(client, FIRST)).status_code == 200
    for path, status in (("/readyz", 200), (f"/v2/models/{SECOND}/ready", 503)):
        assert (await client.get(path)).status_code == status
    assert (await states(client))[SECOND] == "UNAVAILABLE"
    assert SECOND not in await states(client, ready=True)
    await graph.check_health()  # the replica works
    network.write_bytes(whole)
    assert await changed(client, "load", SECOND) == 200
    assert (await classified(client, SECOND)).status_code == 200


async def test_too_little_free_memory_refuses_a_load_with_the_figures(graph, client, monkeypatch):
    await let_idle_go(graph)
    monkeypatch.setattr(set_stages, "free_memory", lambda **_: 60 * 10**6)
    by_name = await client.post(f"{MODELS}/{THIRD}/load")
    on_demand = await classified(client, SECOND)
    texts = by_name.json()["error"], on_demand.json()["error"]["message"]
    for answer, text, name in zip((by_name, on_demand), texts, (THIRD, SECOND), strict=True):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert f"loading {name} needs about " in text
        assert "60 MB are free" in text
    assert (await classified(client, FIRST)).status_code == 200
    monkeypatch.undo()
    monkeypatch.setenv("TANDEM_API_KEYS", KEY)
    assert await changed(client, "load", THIRD) == 200


async def test_a_set_is_unloaded_by_name_and_loaded_again(graph, client):
    network = weakref.ref(graph.stages.members[-1]._network)
    unloaded = await client.post(f"{MODELS}/{SECOND}/unload")
    assert (unloaded.status_code, unloaded.content) == (200, b"")
    assert network() is None
    assert await changed(client, "unload", SECOND) == 200  # it is
    assert (await states(client))[SECOND] == "UNAVAILABLE"
    assert SECOND not in await states(client, ready=True)
    assert (await client.get("/v1/models")).json().get("model_sets") is None
    assert (await classified(client, SECOND)).status_code == 404
    for path in (f"/v2/models/{SECOND}", f"/v2/models/{SECOND}/ready"):
        assert (await client.get(path)).status_code == 404
    assert (await classified(client, FIRST)).status_code == 200
    # HAProxy knows the places of all sets of the settings, however few are served.
    assert graph.service.admission.is_of_all is False
    loaded = await client.post(f"{MODELS}/{SECOND}/load", json={"parameters": {}})
    assert (loaded.status_code, loaded.content) == (200, b"")
    answer = await classified(client, SECOND, "blue")
    assert answer.json()["predictions"][0]["label"] == labels_of("blue")[SECOND]
    body, headers = binary_request(elements(picture("blue")), shape=[1])
    by_protocol = await client.post(f"/v2/models/{SECOND}/infer", content=body, headers=headers)
    assert outputs_of(by_protocol)["label"] == [labels_of("blue")[SECOND]]
    assert set((await states(client)).values()) == {"READY"}


async def test_an_unload_waits_for_the_requests_that_are_under_way(graph, client):
    """None fails, and none that comes later is let in."""
    service = graph.service.of_set(SECOND)
    with service.admission.admit():
        unloading = asyncio.create_task(changed(client, "unload", SECOND))
        await asyncio.sleep(0.2)
        assert (await classified(client, SECOND)).status_code == 404
        assert not unloading.done()
        assert len(graph.stages.members) == 3
    assert await unloading == 200
    assert len(graph.stages.members) == 2


async def test_two_loads_at_once_make_one(client, held):
    await changed(client, "unload", SECOND)
    held[0].set()
    loads = (changed(client, "load", SECOND) for _ in range(3))
    assert await asyncio.gather(*loads) == [200] * 3
    assert await changed(client, "load", SECOND) == 200  # nothing changed
    assert len(held[1]) == 1


async def test_a_set_of_model_dirs_is_loaded_by_its_name(graph, client):
    assert (await classified(client, THIRD)).status_code == 404
    assert await changed(client, "load", THIRD) == 200
    assert (await classified(client, THIRD)).json()["model_set"] == THIRD
    assert (await client.get("/v1/models")).json()["model_sets"] == [FIRST, SECOND, THIRD]
    assert graph.stages.members[-1]._label.startswith(f"{THIRD}.")  # in metrics
    body, headers = binary_request(elements(picture("blue")), shape=[1])
    answer = await client.post(f"/v2/models/{THIRD}/infer", content=body, headers=headers)
    assert answer.status_code == 200
    (counted,) = (await client.get(f"/v2/models/{THIRD}/stats")).json()["model_stats"]
    assert counted["inference_count"] == 1
    assert await changed(client, "unload", THIRD) == 200
    assert (await states(client))[THIRD] == "UNAVAILABLE"


@pytest.mark.parametrize(
    "name",
    ["nobody", f"{FIRST}.sure", "..", "%2e%2e%2fmore%2fthird", "s3:%2f%2fbucket%2fset", "x" * 99,
     f"{THIRD}@0123456789ab"],
)  # fmt: skip
async def test_a_name_that_is_no_known_set_is_refused_and_nothing_is_read(client, name, caplog):
    refused = await client.post(f"{MODELS}/{name}/load")
    assert refused.status_code == 404
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []  # a caller's mistake
    assert "x" * 41 not in refused.text


async def test_a_new_version_takes_the_place_of_the_old_one(graph, client, folders):
    """The set's folder has other labels; the old version's requests end before it goes."""
    before = (await classified(client, SECOND)).json()
    service = graph.service.of_set(SECOND)
    shutil.rmtree(folders[1])
    write_tiny_set(Path(folders[1]), gains={"sure": 2.0}, name=SECOND)
    with service.admission.admit():
        loading = asyncio.create_task(changed(client, "load", SECOND))
        while graph.service.of_set(SECOND) is service:
            await asyncio.sleep(0.01)
        after = (await classified(client, SECOND)).json()
        assert len(graph.stages.members) == 4  # both versions
    assert await loading == 200
    assert len(graph.stages.members) == 3
    assert after["model_version"] != before["model_version"]
    assert after["predictions"][0]["label"] == labels_of("red")[FIRST]
    versions = (await client.get(f"/v2/models/{SECOND}")).json()["versions"]
    assert versions == [after["model_version"], "1"]


@pytest.mark.parametrize("call", ["load", "unload"])
async def test_a_request_whose_body_comes_meanwhile_is_answered(graph, client, folders, call):
    """By the protocol too, where both the path and the body name the set."""
    data, headers = binary_request(elements(picture("red")), shape=[1])
    reading, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield data[:20]
        reading.set()
        await may_end.wait()
        yield data[20:]

    path = f"/v2/models/{SECOND}/infer"
    asked = asyncio.create_task(client.post(path, content=slow(), headers=headers))
    await reading.wait()
    service = graph.service.of_set(SECOND)
    shutil.rmtree(folders[1])
    write_tiny_set(Path(folders[1]), gains={"sure": 2.0}, name=SECOND)
    changing = asyncio.create_task(changed(client, call, SECOND))
    while graph.service.sets.get(SECOND) is service:
        await asyncio.sleep(0.01)
    may_end.set()
    answer = await asked
    assert answer.status_code == 200, answer.text
    assert outputs_of(answer)["label"] == [labels_of("red")[SECOND]]
    assert await changing == 200


async def test_a_new_version_that_cannot_be_served_leaves_the_old_one(client, folders):
    before = (await classified(client, SECOND)).json()
    folder = Path(folders[1])
    manifest = read_manifest(folder)
    (member, *_) = manifest.members
    lighter = member.model_copy(update={"weight": member.weight / 2})
    write_manifest(folder, manifest.model_copy(update={"members": (lighter,)}))
    next(folder.rglob("*.bin")).write_bytes(b"broken")
    refused = await client.post(f"{MODELS}/{SECOND}/load")
    assert refused.status_code >= 400
    assert "was altered" in refused.json()["error"]
    after = (await classified(client, SECOND)).json()
    assert after["model_version"] == before["model_version"]


async def test_of_two_loads_at_once_that_are_called_alike_the_later_is_refused(
    graph, client, tmp_path, monkeypatch
):
    """A set called as a member of the other; neither was served when the other's load began."""
    alike = f"{THIRD}.sure"
    write_tiny_set(tmp_path / "more" / alike, name=alike)
    have_both_begun, begun, built = threading.Event(), [], []
    build, build_stages = graph.stages.build, graph.sets._build_stages

    def slow(*args: object) -> SetStages:
        have_both_begun.wait(10)
        built.append(build(*args))
        return built[-1]

    async def begin(own: Settings, model_set: ModelSet) -> SetStages:
        begun.append(model_set.name)
        if len(begun) == 2:
            have_both_begun.set()
        return await build_stages(own, model_set)

    monkeypatch.setattr(graph.stages, "build", slow)
    monkeypatch.setattr(graph.sets, "_build_stages", begin)
    names = (THIRD, alike)
    answers = await asyncio.gather(*(client.post(f"{MODELS}/{name}/load") for name in names))
    statuses = {name: answer.status_code for name, answer in zip(names, answers, strict=True)}
    served, refused = begun
    assert statuses[served] == 200
    again = await client.post(f"{MODELS}/{refused}/load")  # before it is built
    assert f"{alike} twice" in again.json()["error"]
    assert statuses[refused] == again.status_code == 422
    assert (list(graph.service.sets), len(built)) == ([FIRST, SECOND, served], 2)
    assert not any(hasattr(member, "_network") for member in built[1].members)
    assert (await classified(client, served)).status_code == 200


async def test_parameters_that_would_change_a_set_are_refused(client):
    refused = await client.post(f"{MODELS}/{SECOND}/load", json={"parameters": {"config": "{}"}})
    assert refused.status_code == 422
    assert "config" in refused.json()["error"]
    taken = {"parameters": {"unload_dependents": True}}
    assert await changed(client, "unload", SECOND, json=taken) == 200
    malformed = dict.fromkeys((b"no json", b"[]", b'{"parameters": 1}'), 400)
    for body, status in (malformed | {b" " * 2**17: 413}).items():
        assert await changed(client, "load", SECOND, content=body) == status


async def test_a_key_is_wanted_where_there_are_keys(graph):
    async with client_of(graph, headers={}) as client:
        for path in (f"{MODELS}/{SECOND}/load", f"{MODELS}/{SECOND}/unload", REPOSITORY_INDEX):
            assert (await client.post(path)).status_code == 401


@cases(
    "on_loopback, headers, status",
    ("1", {}, 200),
    ("0", {}, 403),
    (None, {}, 403),
    ("1", {"origin": "https://page.example"}, 403),  # a web page's, in a browser here
    ("1", {"x-forwarded-for": "192.0.2.1"}, 403),
)
async def test_without_keys_only_this_machine_loads_and_unloads(
    settings, monkeypatch, on_loopback, headers, status
):
    for name in ("TANDEM_API_KEYS", "TANDEM_ON_LOOPBACK"):
        monkeypatch.delenv(name, raising=False)
    if on_loopback is not None:
        monkeypatch.setenv("TANDEM_ON_LOOPBACK", on_loopback)
    async with client_of(assemble(settings), headers=headers) as client:
        for call in ("unload", "load"):
            answer = await client.post(f"{MODELS}/{SECOND}/{call}")
            assert answer.status_code == status
            assert status == 200 or "api_keys_file" in answer.json()["error"]
        assert (await client.post(REPOSITORY_INDEX)).status_code == 200


async def test_a_service_that_began_with_one_set_takes_another(settings, folders, monkeypatch):
    monkeypatch.setenv("TANDEM_API_KEYS", KEY)
    graph = assemble(settings.model_copy(update={"model_sets": None, "model_set": folders[0]}))
    async with client_of(graph) as client:
        assert await changed(client, "load", THIRD) == 200
        assert (await classified(client, THIRD)).json()["model_set"] == THIRD
        most = graph.service.of_set(THIRD).settings.max_concurrent_requests
        assert most == settings.max_concurrent_requests // 2
        assert graph.service.admission.is_of_all is False  # HAProxy counts both
        assert await changed(client, "unload", THIRD) == 200
        assert graph.service.admission.is_of_all is True


async def test_all_members_of_a_set_have_its_share(settings):
    graph = assemble(settings.model_copy(update={"set_weights": {SECOND: 3.0}}))
    first, also, second = (member._queue.share for member in graph.stages.members)
    assert first is also
    assert (first.weight, second.weight) == (1.0, 3.0)
    unknown = settings.model_copy(update={"set_weights": {FIRST: 2.0, "nobody": 1.0}})
    with pytest.raises(ConfigError, match=f"set_weights names 'nobody', .* {FIRST}, {SECOND}"):
        served_sets(unknown)


async def test_without_weights_all_sets_weigh_the_same(graph, client):
    await changed(client, "load", THIRD)
    shares = {m._label.partition(".")[0]: m._queue.share for m in graph.stages.members}
    weights = {name: share.weight for name, share in shares.items()}
    assert weights == dict.fromkeys((FIRST, SECOND, THIRD), 1.0)
    assert len(set(shares.values())) == 3
