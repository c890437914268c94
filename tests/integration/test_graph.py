"""Bytes over HTTP, through every stage, to the answer that the networks' construction foretells."""

import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import numpy as np
import pytest

from app.errors import TIMEOUT_COPY
from app.graph.request import TIMEOUT_HEADER
from tests.support.services.deployed import MAX_BATCH_SIZE, MEMBERS
from tests.support.services.processes import EVENTUALLY_S, wait_until
from tests.support.tiny_networks import COLORS, LABELS, expected_label, picture

CLASSIFY = "/v1/classify"


@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_the_right_label_with_the_right_probability(client, color, suffix):
    answer = client.post(CLASSIFY, content=picture(color, 100, suffix)).json()
    assert answer["predictions"][0]["label"] == expected_label(color)
    assert answer["agreement"]
    assert not answer["degraded"]
    expected = {name: math.exp(g) / (math.exp(g) + 2) for name, g in MEMBERS.items()}
    for name, probability in expected.items():
        assert answer["members"][name]["probability"] == pytest.approx(probability, abs=0.03)
    average = (3 * expected["sure"] + expected["unsure"]) / 4  # the manifest's weights
    assert answer["predictions"][0]["probability"] == pytest.approx(average, abs=0.03)
    assert sum(p["probability"] for p in answer["predictions"]) == pytest.approx(1, abs=1e-5)


def stages_of(answer: dict) -> list[dict]:
    return answer["timings_ms"]["stages"]


def test_the_members_run_at_the_same_time(client):
    """One after the other, they would never overlap; a busy machine may begin one late."""

    def overlap() -> bool:
        stages = stages_of(client.post(CLASSIFY, content=picture()).json())
        runs = [s for s in stages if s["stage"] == "infer"]
        assert {run["member"] for run in runs} == set(MEMBERS)
        starts = [run["start_ms"] for run in runs]
        ends = [run["start_ms"] + run["duration_ms"] for run in runs]
        return max(starts) < min(ends)

    wait_until(overlap, EVENTUALLY_S, "members that run at the same time")


def let_in(client, photo):
    """Post a photo, again when the service says so: a machine that is busy takes fewer at once."""
    while (answer := client.post(CLASSIFY, content=photo)).status_code == 429:
        time.sleep(float(answer.headers["retry-after"]))
    return answer.json()


def test_requests_that_come_together_form_batches_and_get_their_own_answers(served):
    colors = [list(COLORS)[i] for i in np.random.default_rng(0).integers(0, 3, 48)]
    with served.client() as client, ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda color: let_in(client, picture(color)), colors))
    assert [a for a in answers if "error" in a] == []
    assert [a["predictions"][0]["label"] for a in answers] == [expected_label(c) for c in colors]
    sizes = [s["batch_size"] for a in answers for s in stages_of(a) if s["stage"] == "infer"]
    assert max(sizes) > 1
    assert max(sizes) <= MAX_BATCH_SIZE


@pytest.mark.parametrize("arrive", ["together", "after a pause"])
def test_trailers_and_internal_headers_pass_serves_own_proxy_in_vain(served, client, arrive):
    """Nobody prepared the proxy, as with ``serve run``."""
    photo, where = picture("red"), ("127.0.0.1", client.base_url.port)
    head = f"POST {CLASSIFY} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{TIMEOUT_COPY}: 0.001\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n"
    end = f"0\r\nX-Request-ID: of-a-trailer\r\n{TIMEOUT_HEADER}: no-number\r\n\r\n"
    with socket.create_connection(where, 60) as connection:
        connection.sendall(head.encode() + b"%x\r\n%b\r\n" % (len(photo), photo))
        if arrive == "after a pause":
            time.sleep(0.1)
        connection.sendall(end.encode())
        told = b"".join(iter(lambda: connection.recv(65536), b""))
    assert told.startswith(b"HTTP/1.1 200 ")
    assert b"of-a-trailer" not in told


def test_what_is_served(client):
    served = client.get("/v1/models").json()
    assert served["model_set"] == "tiny"
    assert served["labels"] == list(LABELS)
    weights = {member["name"]: member["weight"] for member in served["members"]}
    assert weights == {"sure": 3.0, "unsure": 1.0}
    runtimes = {(m["runtime"]["name"], m["runtime"]["version"]) for m in served["members"]}
    assert runtimes == {("openvino", version("openvino"))}
