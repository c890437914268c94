"""Model sets in one ``tandem serve``: each by its name, one under a load, loaded and unloaded."""

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
import tritonclient.http as triton
from playwright.sync_api import expect

from app.grpc.open_inference_pb2 import RepositoryModelLoadRequest, RepositoryModelUnloadRequest
from tandem_client import BadRequest, Client
from tandem_client.grpc_client import GrpcClient
from tests.support.open_inference_stub import inference_stub
from tests.support.services.live_service import run_tandem
from tests.support.services.page_driver import drop
from tests.support.services.processes import descendants, serve_logs, title, wait_until
from tests.support.several_sets import FIRST, SECOND, labels_of, write_two_sets
from tests.support.tiny_networks import picture

pytestmark = pytest.mark.slow
NAMES = [FIRST, SECOND]
WITHIN_S = 90
NUM_ASKED = 40  # a Gateway of two is left out by chance once in 2^39


@pytest.fixture(scope="module")
def service_url(start_service, grpc_port, tmp_path_factory) -> str:
    sets = ",".join(write_two_sets(tmp_path_factory.mktemp("sets")))
    options = ("--model-set", sets, "--grpc-port", str(grpc_port))
    return start_service(*options, args={"unload_after_s": 1}).url


def classified(client: httpx.Client, name: str, color: str = "red") -> httpx.Response:
    return client.post("/v1/classify", params={"model_set": name}, content=picture(color))


def test_each_set_answers_by_its_name(client):
    assert client.get("/v1/models").json()["model_sets"] == NAMES
    for name in NAMES:
        answer = classified(client, name).json()
        assert answer["model_set"] == name
        assert answer["predictions"][0]["label"] == labels_of("red")[name]
        assert client.get(f"/v2/models/{name}/ready").json() == {"name": name, "ready": True}
    refused = classified(client, "nobody")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].endswith(f"there are {', '.join(NAMES)}")


def test_the_clients_and_the_command_line_name_a_set(service_url, grpc_port, tmp_path):
    photo = tmp_path / "blue.png"
    photo.write_bytes(picture("blue"))
    with Client(service_url) as http, GrpcClient(f"127.0.0.1:{grpc_port}") as grpc:
        for name in NAMES:
            label = labels_of("blue")[name]
            assert http.classify(photo, model_set=name).label == label
            assert grpc.classify(photo, model_set=name).label == label
        for client in (http, grpc):
            with pytest.raises(BadRequest, match=f"there are {FIRST}, {SECOND}"):
                client.classify(photo, model_set="nobody")
    done = run_tandem("classify", photo, "--url", service_url, "--json", "--model-set", SECOND)
    assert json.loads(done.stdout)["predictions"][0]["label"] == labels_of("blue")[SECOND]


def test_a_crowd_for_one_set_leaves_the_other_answered(client):
    """More clients than the first set has places, and one for the second that is never refused."""
    limits = httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=client.base_url, timeout=60, limits=limits) as loaded,
        ThreadPoolExecutor(96) as pool,
    ):
        crowd = [pool.submit(classified, loaded, FIRST) for _ in range(1500)]
        quiet = [classified(client, SECOND, "blue") for _ in range(20)]
        statuses = {done.result().status_code for done in crowd}
    for answer in quiet:
        assert answer.status_code == 200, answer.text
        assert answer.json()["predictions"][0]["label"] == labels_of("blue")[SECOND]
    assert statuses <= {200, 429}


def states(client: httpx.Client) -> dict[str, tuple[str, str]]:
    index = client.post("/v2/repository/index").json()
    return {entry["name"]: (entry["state"], entry["reason"]) for entry in index}


def test_an_idle_set_is_unloaded_and_comes_back_when_asked(client):
    wait_until(lambda: "not in memory" in states(client)[SECOND][1], 60, "the second set to go")
    assert client.get("/readyz").status_code == 200
    assert client.get(f"/v2/models/{SECOND}/ready").status_code == 200
    assert states(client)[FIRST] == ("READY", "")
    with ThreadPoolExecutor(4) as pool:  # one load for all
        answers = list(pool.map(lambda _: classified(client, SECOND), range(4)))
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["predictions"][0]["label"] == labels_of("red")[SECOND]


def test_tritons_client_unloads_and_loads_a_set_while_both_are_asked(
    client, service_url, grpc_port
):
    """No request for the other fails; of its own each is answered, or it is not there."""
    repository = triton.InferenceServerClient(service_url.removeprefix("http://"))
    stop = threading.Event()

    def ask(name: str) -> Counter[int]:
        statuses: Counter[int] = Counter()
        while not stop.is_set():
            statuses[classified(client, name).status_code] += 1
        return statuses

    with ThreadPoolExecutor(6) as pool:
        asked = {name: [pool.submit(ask, name) for _ in range(3)] for name in NAMES}
        try:
            for _ in range(5):
                repository.unload_model(SECOND)
                assert states(client)[SECOND][0] == "UNAVAILABLE"
                assert not repository.is_model_ready(SECOND)
                repository.load_model(SECOND)
                assert repository.is_model_ready(SECOND)
        finally:
            stop.set()
        of_each = {name: sum((done.result() for done in asked[name]), Counter()) for name in NAMES}
    assert of_each[FIRST].keys() == {200}
    assert of_each[SECOND].keys() <= {200, 404}
    assert classified(client, SECOND, "blue").status_code == 200
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = inference_stub(channel)
        with pytest.raises(grpc.RpcError, match="the default set"):
            stub.RepositoryModelUnload(RepositoryModelUnloadRequest(model_name=FIRST), timeout=60)
        stub.RepositoryModelUnload(RepositoryModelUnloadRequest(model_name=SECOND), timeout=60)
        assert classified(client, SECOND).status_code == 404
        stub.RepositoryModelLoad(RepositoryModelLoadRequest(model_name=SECOND), timeout=60)
    assert classified(client, SECOND).status_code == 200


@pytest.mark.browser
def test_the_page_lets_one_choose_a_set(open_page, tmp_path):
    page = open_page()
    chosen = page.get_by_label("Model set")
    expect(chosen.locator("option")).to_have_text(NAMES)
    expect(chosen).to_have_value(FIRST)
    drop(page, ("red.png", "image/png", picture("red")))
    expect(page.locator("#headline")).to_have_text(labels_of("red")[FIRST])
    chosen.select_option(SECOND)
    expect(page.locator("#headline")).to_have_text(labels_of("red")[SECOND])
    expect(page.locator("#classes")).to_contain_text(f"The served set, {SECOND}")
    expect(chosen).to_have_value(SECOND)
    page.screenshot(path=tmp_path / "sets.png")


@pytest.fixture(scope="module")
def two_gateways(start_service, tmp_path_factory):
    sets = ",".join(write_two_sets(tmp_path_factory.mktemp("sets")))
    return start_service("--model-set", sets, gateways=2)


@pytest.fixture
def client_of_two(two_gateways):
    url = two_gateways.url
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        yield client


def statuses(client: httpx.Client) -> Counter[int]:
    """Ask for the second set on new connections, which Gateways take in turns."""
    counts: Counter[int] = Counter()
    for _ in range(NUM_ASKED):
        counts[classified_of_shared_sets(client).status_code] += 1
    return counts


def classified_of_shared_sets(client: httpx.Client) -> httpx.Response:
    query, headers = {"model_set": SECOND}, {"connection": "close"}
    return client.post("/v1/classify", params=query, content=picture("red"), headers=headers)


def changed(client: httpx.Client, how: str) -> None:
    answer = client.post(f"/v2/repository/models/{SECOND}/{how}")
    assert answer.status_code == 200, answer.text


def gateways(service):
    processes = descendants(service.process.pid)
    return {p.pid for p in processes if title(p).startswith("ray::ServeReplica:tandem:Gateway")}


def test_all_gateways_follow_and_so_does_one_that_is_replaced(two_gateways, client_of_two):
    assert statuses(client_of_two) == {200: NUM_ASKED}
    changed(client_of_two, "unload")
    assert statuses(client_of_two) == {404: NUM_ASKED}
    before = gateways(two_gateways)
    assert len(before) == 2
    (first, *_) = (p for p in descendants(two_gateways.process.pid) if p.pid in before)
    first.kill()
    wait_until(lambda: num_unloaded(two_gateways) == 3, WITHIN_S, "another Gateway to follow")
    wait_until(lambda: len(gateways(two_gateways) - {first.pid}) == 2, WITHIN_S, "two Gateways")
    assert statuses(client_of_two) == {404: NUM_ASKED}
    changed(client_of_two, "load")
    assert statuses(client_of_two) == {200: NUM_ASKED}


def num_unloaded(service):
    """Return how many Gateways have unloaded the second set, by their logs."""
    logs = serve_logs(service.process.pid).glob("*Gateway*.log")
    return sum(f"model set {SECOND}, version" in log.read_text() for log in logs)
