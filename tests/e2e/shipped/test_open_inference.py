"""Unmodified clients of the Open Inference Protocol, each in a process of its own, at the service.

They agree with /v1/classify. A batch is padded up and may be split otherwise than a form's, which
changes the order of additions: single images agree to 1e-6, batches as other processes do.
"""

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.setting_groups import LimitSettings
from models.image import read_image
from models.model_set import load_model_set
from tests.support.client_environments import KSERVE, NEIGHBOURS
from tests.support.services.live_service import SAME_PROBABILITY, drawn_photo

CLIENTS = Path(__file__).parents[2] / "support" / "open_inference_clients"
SINGLE = 1e-6
OF_HTTP = {"pixels in JSON", "binary in, JSON out", "gzip", "deflate"}
WAYS = {"image", "image of two dimensions", "pixels", "batch"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A photo, three images' pixels (the first one's are the photo's), and the model's name."""
    folder = tmp_path_factory.mktemp("images")
    model_set = load_model_set("imagenette")
    photos = [drawn_photo(seed) for seed in (3, 4, 5)]
    (folder / "photo.jpg").write_bytes(photos[0])
    (folder / "model").write_text(model_set.name)
    rule = model_set.manifest.image.rule
    np.save(folder / "pixels.npy", np.stack([read_image(photo, rule) for photo in photos]))
    return folder


@pytest.fixture(scope="module")
def expected(service) -> list[list[float]]:
    """What /v1/classify says to each photo, by class."""
    rows = []
    for seed in (3, 4, 5):
        answer = httpx.post(
            f"{service.url}/v1/classify?top_k=10", content=drawn_photo(seed), timeout=60
        ).json()
        predictions = sorted(answer["predictions"], key=lambda one: one["index"])
        rows.append([one["probability"] for one in predictions])
    return rows


@pytest.fixture(scope="module")
def told(service, grpc_port, folder) -> dict[str, Any]:
    """What Triton's clients were told, by client."""
    addresses = [f"127.0.0.1:{port}" for port in (service.port, grpc_port)]
    return run_client("triton.py", *addresses, folder)


def run_client(name, *arguments, python=sys.executable):
    """Run one of the programs, and return what it prints."""
    command = [python, CLIENTS / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("client", ["http", "grpc", "http.aio", "grpc.aio"])
def test_tritons_clients_agree_with_v1(told, expected, client):
    ways = WAYS | (OF_HTTP if client.startswith("http") else {"gzip"})
    labels = load_model_set("imagenette").labels
    assert ways <= set(told[client])
    for way in ways:
        rows, names = (told[client][way][name] for name in ("probabilities", "label"))
        if way == "batch":
            assert rows == pytest.approx(np.array(expected), abs=SAME_PROBABILITY), way
        else:
            assert rows == pytest.approx(np.array(expected[:1]), abs=SINGLE), way
        assert names == [labels[int(np.argmax(row))] for row in rows], way


@pytest.mark.parametrize("client", ["http", "grpc", "http.aio", "grpc.aio"])
def test_classification_strings_of_tritons_clients(told, expected, client):
    found = [one.split(":") for one in told[client]["classes"]]
    best = np.argsort(-np.array(expected[0]), kind="stable")[:3]
    assert [int(index) for _, index, _ in found] == best.tolist()
    assert [float(p) for p, _, _ in found] == pytest.approx(
        [expected[0][i] for i in best], abs=SINGLE
    )


@pytest.mark.parametrize("client", ["http", "grpc"])
def test_what_tritons_clients_are_told_beside(told, client, service):
    answers = told[client]
    over_v1 = httpx.post(f"{service.url}/v1/classify?top_k=10", content=drawn_photo(), timeout=60)
    own = over_v1.json()["members"]["resnet50"]["predictions"]
    row = [one["probability"] for one in sorted(own, key=lambda one: one["index"])]
    assert answers["member"]["probabilities"] == pytest.approx(np.array([row]), abs=SINGLE)
    status, message = answers["error"]
    assert status in ("400", "StatusCode.INVALID_ARGUMENT")
    assert "image 0 of 1" in message
    assert answers["server"]["name"] == "tandem"
    assert [one["name"] for one in answers["metadata"]["inputs"]] == ["image", "pixels"]
    config = answers["config"] if client == "http" else answers["config"]["config"]
    assert config["max_batch_size"] == LimitSettings().max_files
    dims = {one["name"]: [int(size) for size in one["dims"]] for one in config["input"]}
    assert dims == {"image": [1], "pixels": [128, 128, 3]}
    assert [one["data_type"] for one in config["output"]] == ["TYPE_FP32", "TYPE_STRING"]
    index = answers["index"]
    assert (index if client == "http" else index["models"])[0]["state"] == "READY"
    (stats,) = answers["statistics"]["model_stats"]
    assert int(stats["inference_count"]) >= 8


def test_the_client_that_is_made_from_the_protocols_own_definition(
    service, grpc_port, folder, expected
):
    told = run_client("open_inference_grpc.py", f"127.0.0.1:{grpc_port}", folder)
    label = load_model_set("imagenette").labels[int(np.argmax(expected[0]))]
    for way in ("typed image", "typed pixels", "raw pixels"):
        assert told[way]["probabilities"] == pytest.approx(expected[0], abs=SINGLE), way
        assert told[way]["label"] == label, way
    assert (told["server"], told["inputs"]) == ("tandem", ["image", "pixels"])


def test_an_inference_is_a_trace(service):
    answer = httpx.post(
        f"{service.url}/v2/models/imagenette/infer",
        content=drawn_photo(),
        headers={"inference-header-content-length": "0"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert len(answer.headers["x-trace-id"]) == 32


@pytest.fixture(scope="module")
def told_by_memory(service, grpc_port, folder) -> dict[str, Any]:
    """What Triton's clients were told that pass tensors in shared memory, by client."""
    addresses = [f"127.0.0.1:{port}" for port in (service.port, grpc_port)]
    return run_client("triton_shared_memory.py", *addresses, folder)


@pytest.mark.parametrize("client", ["http", "grpc"])
def test_tensors_in_shared_memory_agree_with_v1(told_by_memory, expected, client):
    labels = load_model_set("imagenette").labels
    for way in ("image", "pixels", "half", "batch"):
        rows, names = (told_by_memory[client][way][name] for name in ("probabilities", "label"))
        near, count = (SAME_PROBABILITY, 3) if way == "batch" else (SINGLE, 1)
        assert rows == pytest.approx(np.array(expected[:count]), abs=near), way
        assert names == [labels[int(np.argmax(row))] for row in rows], way


@pytest.mark.parametrize("client", ["http", "grpc"])
def test_what_clients_are_told_of_their_regions(told_by_memory, client):
    told = told_by_memory[client]
    assert "No such file" in told["gone"]
    assert "'nothing' is not registered" in told["unknown"]
    assert "CUDA shared memory is not supported" in told["cuda"]
    status, left = told["status"], told["left"]
    (mine,) = status if client == "http" else status["regions"].values()
    assert (mine["name"], int(mine["offset"]), int(mine["byte_size"])) == ("mine", 10, 90)
    assert mine["key"].startswith("/tandem-test-")
    assert left in ([], {})
    assert "system_shared_memory" in told["extensions"]


@pytest.mark.slow  # the protocol itself is tested with the other clients
@pytest.mark.kserve
def test_kserves_clients_agree_with_v1(service, grpc_port, folder, expected):
    addresses = [f"127.0.0.1:{port}" for port in (service.port, grpc_port)]
    told = run_client("kserve_client.py", *addresses, folder, python=KSERVE)
    labels = load_model_set("imagenette").labels
    ways = {
        "http": {"image", "batch", "pixels in JSON"},
        "grpc": {"image", "batch", "typed pixels"},
        "v1": {"image", "named image"},
    }
    assert {client: set(answers) for client, answers in told.items()} == ways
    for client in ways:
        for way, answer in told[client].items():
            is_batch = way == "batch"
            rows = np.array(expected if is_batch else expected[:1])
            within = SAME_PROBABILITY if is_batch else SINGLE
            assert answer["probabilities"] == pytest.approx(rows, abs=within), way
            assert answer["label"] == [labels[int(np.argmax(row))] for row in rows], way


@pytest.mark.slow  # the protocol itself is tested in unit/grpc and unit/http
@pytest.mark.neighbours
@pytest.mark.parametrize("client", ["http", "grpc"])
def test_openvino_model_servers_client_agrees_with_v1(told_by_ovms, expected, client):
    told, labels = told_by_ovms[client], load_model_set("imagenette").labels
    rows = {"image": [0], "images": [0, 0], "batch": [0, 1, 2], "version 1": [0]}
    for way, numbers in rows.items():
        wanted = np.array(expected)[numbers]
        within = SINGLE if len(numbers) == 1 else SAME_PROBABILITY
        assert told[way]["probabilities"] == pytest.approx(wanted, abs=within), way
        assert told[way]["label"] == [labels[i] for i in wanted.argmax(1)], way
    available = {"state": "AVAILABLE", "error_code": 0, "error_message": ""}
    assert told["status"] == {"1": available}
    metadata = told["metadata"]
    assert metadata["model_version"] == 1
    assert metadata["inputs"]["image"] == {"dtype": "DT_STRING", "shape": [-1]}
    assert metadata["outputs"]["probabilities"] == {"dtype": "DT_FLOAT", "shape": [-1, 10]}
    assert "no model 'nothing'" in told["no model"]
    assert "no version '7'" in told["no version"]
    assert "image 0 of 1" in told["no image"]


@pytest.fixture(scope="module")
def told_by_ovms(service, grpc_port, folder) -> dict[str, Any]:
    """What OpenVINO Model Server's client was told, by protocol."""
    addresses = [f"127.0.0.1:{port}" for port in (service.port, grpc_port)]
    return run_client("ovms.py", *addresses, folder, python=NEIGHBOURS)


@pytest.mark.slow
@pytest.mark.neighbours
@pytest.mark.parametrize("batch", [1, 4])
def test_mlserver_infer_sends_photographs(service, expected, tmp_path, batch):
    """Five lines of JSON, each with a file in base64; the fourth is no image."""
    files = [*map(drawn_photo, (3, 4, 5)), b"no image, but as many bytes", drawn_photo(3)]
    lines = [
        {"name": "image", "datatype": "BYTES", "shape": [1], "data": [b64encode(file).decode()]}
        for file in (files if batch == 1 else files[:3])
    ]
    asked, told = tmp_path / "asked.jsonl", tmp_path / "told.jsonl"
    asked.write_text("".join(json.dumps({"inputs": [line]}) + "\n" for line in lines))
    options = {"-u": f"127.0.0.1:{service.port}", "-m": "imagenette", "-s": batch, "-r": 1}
    command = [NEIGHBOURS.with_name("mlserver"), "infer", "-i", asked, "-o", told]
    command += [str(part) for option in options.items() for part in option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in told.read_text().splitlines()]
    answers.sort(key=lambda one: one["parameters"]["batch_index"])
    assert len(answers) == len(lines)
    labels = load_model_set("imagenette").labels
    for number, answer in enumerate(answers):
        if number == 3:
            assert "image 0 of 1" in answer["error"]["msg"]
            continue
        rows, names = (output["data"] for output in answer["outputs"])
        wanted = expected[number % 4]
        assert rows == pytest.approx(wanted, abs=SAME_PROBABILITY)
        assert names == [labels[int(np.argmax(wanted))]]
