"""The HTTP interface of the real service: what a good client sends, and what it gets."""

import base64
import re
import socket
from urllib.parse import urljoin, urlsplit

import numpy as np
import pytest

from models.ensemble import tempered
from models.model_set import load_model_set
from tests.support.services.live_service import SAME_PROBABILITY, drawn_photo


def by_index(answer: dict) -> np.ndarray:
    """Put an answer's probabilities in the order of the classes."""
    row = np.zeros(len(answer["predictions"]))
    for prediction in answer["predictions"]:
        row[prediction["index"]] = prediction["probability"]
    return row


@pytest.fixture(scope="module")
def labels() -> tuple[str, ...]:
    return load_model_set("imagenette").labels


@pytest.mark.parametrize("kind", [None, "image/jpeg", "image/png", "text/html", "nonsense", ""])
def test_the_body_counts_and_not_what_it_is_called(client, photo, photo_label, kind):
    headers = {} if kind is None else {"content-type": kind}
    answer = client.post("/v1/classify", content=photo, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["predictions"][0]["label"] == photo_label


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_the_answer_is_that_of_the_networks_without_a_service(client, in_process, labels, seed):
    data = drawn_photo(seed)
    answer = client.post(f"/v1/classify?top_k={len(labels)}", content=data).json()
    assert by_index(answer) == pytest.approx(in_process(data), abs=SAME_PROBABILITY)
    members = [by_index(member) for member in answer["members"].values()]
    mean = np.asarray(members, np.float32).mean(axis=0, keepdims=True)
    averaged = tempered(mean, load_model_set("imagenette").manifest.temperature)[0]
    assert averaged == pytest.approx(in_process(data), abs=SAME_PROBABILITY)
    firsts = {member["label"] for member in answer["members"].values()}
    assert answer["agreement"] == (len(firsts) == 1)
    assert answer["degraded"] is False
    probabilities = [p["probability"] for p in answer["predictions"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert [p["label"] for p in answer["predictions"]] == [
        labels[p["index"]] for p in answer["predictions"]
    ]


def test_kserves_v1_has_the_same_answer(client, photo, in_process, photo_label):
    row = {"b64": base64.b64encode(photo).decode()}
    answer = client.post("/v1/models/imagenette:predict", json={"instances": [row, row]})
    assert answer.status_code == 200, answer.text
    for prediction in answer.json()["predictions"]:
        assert prediction["label"] == photo_label
        assert prediction["probabilities"] == pytest.approx(in_process(photo), abs=SAME_PROBABILITY)
    nothing = client.post("/v1/models/imagenette:predict", content=photo)
    assert (nothing.status_code, "no JSON" in nothing.json()["error"]) == (400, True)


@pytest.mark.parametrize(("query", "number"), [("", 5), *((f"?top_k={n}", n) for n in (1, 3, 10))])
def test_as_many_classes_as_are_asked_for(client, photo, query, number):
    answer = client.post(f"/v1/classify{query}", content=photo).json()
    assert len(answer["predictions"]) == number
    assert {len(member["predictions"]) for member in answer["members"].values()} == {number}


@pytest.mark.parametrize("count", [1, 2, 9, 64])
def test_a_form_of_files_is_answered_in_order(client, in_process, count):
    photos = [drawn_photo(seed) for seed in range(min(count, 9))]
    expected = [in_process(data) for data in photos]
    files = [("files", (f"{i}.jpg", photos[i % 9], "image/jpeg")) for i in range(count)]
    answer = client.post("/v1/classify?top_k=10", files=files)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert len(results) == count
    for i, result in enumerate(results):
        assert by_index(result) == pytest.approx(expected[i % 9], abs=SAME_PROBABILITY)
        assert result["request_id"] == answer.json()["request_id"]


def test_a_bad_file_leaves_its_neighbours_alone(client, photo, photo_label):
    bodies = [b"", photo, b"some text", photo[:500], photo]
    answer = client.post("/v1/classify", files=[("f", (str(i), b)) for i, b in enumerate(bodies)])
    assert answer.status_code == 200
    results = answer.json()["results"]
    codes = [result.get("error", {}).get("code") for result in results]
    assert codes == ["not_an_image", None, "not_an_image", "corrupt_image", None]
    assert {results[i]["predictions"][0]["label"] for i in (1, 4)} == {photo_label}
    answer = client.post("/v1/classify", files=[("f", ("a", b"text")), ("f", ("b", b"text"))])
    assert answer.status_code == 200
    assert [r["error"]["code"] for r in answer.json()["results"]] == ["not_an_image"] * 2


def test_the_models_are_described(client, labels):
    served = client.get("/v1/models").json()
    manifest = load_model_set("imagenette").manifest
    assert served["model_set"] == manifest.name
    assert served["labels"] == list(labels)
    assert served["input_size"] == manifest.image.input_size
    members = {member["name"]: member["precision"] for member in served["members"]}
    assert members == {member.name: "INT8" for member in manifest.members}
    for record, expected in zip(served["accuracy"], manifest.accuracy, strict=True):
        assert record == expected.model_dump(mode="json")
    assert (served["verified"], served["max_drop"]) == ("verified", manifest.max_drop)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_it_says_that_it_lives_and_is_ready(client, path):
    answer = client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"ready": True})


def test_docs_and_all_they_need_come_from_here(client):
    page = client.get("/docs")
    addresses = re.findall(r"""(?:src|href)=["']([^"']+)|fetch\(["']([^"']+)""", page.text)
    assert len(addresses) >= 4  # script, style, icon, interface
    for address in ("".join(found) for found in addresses):
        absolute = urljoin(str(page.url), address)
        assert urlsplit(absolute).netloc == page.url.netloc.decode(), address
        answer = client.get(absolute, headers={"accept": "text/html,*/*"})  # as a browser asks
        assert len(answer.raise_for_status().content) > 200
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/classify", "/v1/models", "/readyz", "/healthz"} <= paths.keys()


def test_every_request_has_an_id_its_own_or_the_clients(client, photo):
    ids, its_own = [], {"x-request-id": "1"}
    for content, headers in ((photo, its_own), (b"text", its_own), (photo, {}), (photo, {})):
        answer = client.post("/v1/classify", content=content, headers=headers)
        ids.append(answer.headers["x-request-id"])
        assert answer.json().get("error", answer.json())["request_id"] == ids[-1]
    assert (ids[:2], len(set(ids))) == (["1", "1"], 3)


def test_the_times_add_up(client, photo):
    answer = client.post("/v1/classify", content=photo)
    timings, members = answer.json()["timings_ms"], answer.json()["members"]
    stages = {(s["stage"], s.get("member")): s for s in timings["stages"]}
    of_members = {(stage, name) for stage in ("queue", "infer") for name in members}
    assert stages.keys() == of_members | {("read", None), ("decode", None), ("combine", None)}
    for stage in stages.values():
        assert stage["start_ms"] >= 0
        assert stage["duration_ms"] >= 0
        assert stage["start_ms"] + stage["duration_ms"] <= timings["total"] + 0.01  # rounding
    assert all(stages["infer", name]["duration_ms"] > 0 for name in members)
    assert all(stages["infer", name]["batch_size"] >= 1 for name in members)
    assert timings["total"] <= answer.elapsed.total_seconds() * 1e3


def exchange(connection: socket.socket, head: str, body: bytes, until: bytes) -> bytes:
    connection.sendall(head.encode() + body)
    got = b""
    while until not in got:
        chunk = connection.recv(65536)
        assert chunk, got
        got += chunk
    return got


def test_a_client_that_waits_to_be_told_to_continue(service_url, photo):
    where = urlsplit(service_url)
    head = f"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Length: {len(photo)}\r\n"
    head += "Expect: 100-continue\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), 30) as connection:
        assert b" 100 " in exchange(connection, head, b"", b"\r\n\r\n").splitlines()[0]
        assert b" 200 " in exchange(connection, "", photo, b'"timings_ms"').splitlines()[0]


def test_one_connection_serves_request_after_request(client, photo):
    ports, statuses = set(), []
    asked = [("/v1/classify", data) for data in (photo, b"text", b"", photo)]
    unread = [(path, data) for path in ("/nothing", "/v1/models") for data in (b"", b"image")]
    for path, data in asked + unread:
        answer = client.post(path, content=data)
        statuses.append(answer.status_code)
        ports.add(answer.extensions["network_stream"].get_extra_info("client_addr")[1])
    assert statuses == [200, 400, 400, 200, 404, 404, 405, 405]
    assert len(ports) == 1


@pytest.mark.parametrize("path", ["/", "/docs", "/healthz", "/v1/models", "/v2", "/page/page.js"])
def test_head_is_get_without_its_content(client, path):
    told, asked = client.head(path), client.get(path)
    assert (told.status_code, told.content) == (200, b"")
    assert told.headers["content-length"] == str(len(asked.content))


@pytest.mark.parametrize("path", ["/v1/classify/", "/healthz/", "/docs/", "/page", "/v1/models/"])
def test_a_slash_at_the_end_redirects_nobody(client, path):
    for answer in (client.get(path), client.post(path, content=b"photo")):
        assert answer.status_code == 404
        assert "location" not in answer.headers
        assert "http:" not in answer.text
        assert ".sock" not in answer.text


def test_a_body_that_is_announced_too_large_is_not_asked_for(service_url):
    where = urlsplit(service_url)
    head = b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
    with socket.create_connection((where.hostname, where.port), 30) as connection:
        connection.sendall(head + b"Content-Length: 99999999\r\n\r\n")
        told = connection.recv(65536)
        connection.shutdown(socket.SHUT_WR)
        told += b"".join(iter(lambda: connection.recv(65536), b""))
    assert told.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in told
