"""Several sets in one service: who answers, who is refused, and what a set's load leaves others."""

import asyncio

import pytest

from app import errors
from app.graph.served_models import served_sets
from app.serve.gateway import Assembly, assemble
from app.settings import Settings
from app.telemetry.metric_table import MEMBER_IMAGES
from tests.support.open_inference import binary_request, client_of, elements, outputs_of
from tests.support.several_sets import FIRST, OTHER_SIZE, SECOND, labels_of, write_two_sets
from tests.support.tiny_networks import SIZE, picture

NAMES = [FIRST, SECOND]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_two_sets(tmp_path_factory.mktemp("sets"))


def settings_of(folders: tuple[str, ...], **more: object) -> Settings:
    return Settings(model_sets=folders, compile_cache=None, **more)


@pytest.fixture
def graph(folders) -> Assembly:
    return assemble(settings_of(folders))


@pytest.fixture
def client(graph):
    return client_of(graph)


async def test_a_request_names_its_set_or_gets_the_first(client):
    red = picture("red")
    for query, name in ({}, FIRST), ({"model_set": FIRST}, FIRST), ({"model_set": SECOND}, SECOND):
        answer = (await client.post("/v1/classify", params=query, content=red)).json()
        served = (await client.get("/v1/models", params=query)).json()
        assert (served["model_set"], served["model_sets"]) == (name, NAMES)
        assert (answer["model_set"], answer["model_version"]) == (name, served["model_version"])
        assert answer["predictions"][0]["label"] == labels_of("red")[name]


async def test_each_set_is_a_model_of_the_protocol(client):
    index = [entry["name"] for entry in (await client.post("/v2/repository/index")).json()]
    assert index == [FIRST, f"{FIRST}.sure", f"{FIRST}.unsure", SECOND, f"{SECOND}.sure"]
    for name, size in ((FIRST, SIZE), (SECOND, OTHER_SIZE)):
        model = f"/v2/models/{name}"
        told = (await client.get(model)).json()
        assert told["inputs"][1]["shape"] == [-1, size, size, 3]
        version = (await client.get("/v1/models", params={"model_set": name})).json()
        assert told["versions"] == [version["model_version"], "1"]
        body, headers = binary_request(elements(picture("blue")), shape=[1])
        for way in (model, f"{model}.sure"):
            answer = await client.post(f"{way}/infer", content=body, headers=headers)
            assert outputs_of(answer)["label"] == [labels_of("blue")[name]]
        (counted,) = (await client.get(f"{model}/stats")).json()["model_stats"]
        assert (counted["inference_count"], counted["version"]) == (1, told["versions"][0])


@pytest.mark.parametrize("name", ["none", "", "tiny.sure", "x" * 99])
async def test_a_set_that_is_not_served_is_not_found(client, name):
    query = {"model_set": name}
    for answer in [
        await client.post("/v1/classify", params=query, content=picture()),
        await client.get("/v1/models", params=query),
    ]:
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "unknown_model"
        assert error["message"].endswith(f"there are {FIRST}, {SECOND}")
        assert "x" * 41 not in error["message"]


async def test_readiness_is_of_every_set_and_of_each(graph, client, monkeypatch):
    assert (await client.get("/readyz")).status_code == 200
    other = graph.service.of_set(SECOND)

    async def gone() -> None:
        raise errors.NotReadyError("its member hangs")

    monkeypatch.setattr(other, "check_ready", gone)
    failing = ("/readyz", "/v2/health/ready", f"/v2/models/{SECOND}/ready", f"/v1/models/{SECOND}")
    ready = (f"/v2/models/{FIRST}/ready", f"/v1/models/{FIRST}")
    for way, status in (dict.fromkeys(failing, 503) | dict.fromkeys(ready, 200)).items():
        assert (await client.get(way)).status_code == status
    assert (await client.post("/v1/classify", content=picture())).status_code == 200


async def test_a_sets_load_leaves_the_other_its_places(folders):
    """Half of the places are each set's; what is refused is the loaded set's own."""
    graph = assemble(settings_of(folders, max_concurrent_requests=8, target_wait_ms=None))
    client = client_of(graph)

    async def post(name: str) -> int:
        query = {"model_set": name}
        return (await client.post("/v1/classify", params=query, content=picture())).status_code

    for loaded, other in (NAMES, NAMES[::-1]):
        load = [asyncio.create_task(post(loaded)) for _ in range(200)]
        quiet = [asyncio.create_task(post(other)) for _ in range(4)]
        assert await asyncio.gather(*quiet) == [200] * 4
        statuses = await asyncio.gather(*load)
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 4


async def test_the_sets_answers_are_kept_apart_in_the_cache(folders):
    client = client_of(assemble(settings_of(folders, cache="local")))
    for cached in (None, True):
        for name in NAMES:
            query = {"model_set": name}
            answer = await client.post("/v1/classify", params=query, content=picture("green"))
            assert answer.json().get("cached") is cached
            assert answer.json()["predictions"][0]["label"] == labels_of("green")[name]


async def test_metrics_name_a_member_with_its_set(folders, told):
    client = client_of(assemble(settings_of(folders)))
    await client.post("/v1/classify", params={"model_set": SECOND}, content=picture())
    assert told.of(MEMBER_IMAGES) == {(f"{SECOND}.sure",): 1}


def test_the_key_file_is_read_once_for_all_sets(folders, tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text("k" * 32)
    path.chmod(0o644)  # which is warned of
    graph = assemble(settings_of(folders, api_keys_file=path))
    assert len([r for r in caplog.records if str(path) in r.getMessage()]) == 1
    assert graph.service.of_set(SECOND).keys is graph.service.keys


def test_two_sets_of_one_name_are_refused(folders, tmp_path):
    first, second = folders
    with pytest.raises(errors.ConfigError, match=r"model_sets has tiny twice, .* leave one out"):
        served_sets(settings_of((first, second, first)))
