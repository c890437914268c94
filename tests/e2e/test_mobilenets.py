"""Other people's networks, from their files to answers over HTTP: TFLite, of three sizes.

In the fast tier: tests/unit/calibration/sets/test_tflite.py, fifty photographs in process;
tests/unit/graph/test_members.py, every stage with drawn pictures.
"""

import httpx
import pytest

from tests.support.imagenet_small import MEMBERS
from tests.support.services.live_service import live_report, run_tandem

pytestmark = [pytest.mark.slow, pytest.mark.shared_data]

NUM_IMAGES = 200


@pytest.fixture(scope="module")
def mobilenets(shared_data, tmp_path_factory):
    """Return the folder of the set, as the command makes it."""
    folder, into = shared_data / "imagenet-small", tmp_path_factory.mktemp("sets")
    members = [f"{name}={folder / 'tflite' / file}" for name, file in MEMBERS.items()]
    names = ("--labels", folder / "labels.txt", "--class-ids", folder / "class_ids.txt")
    options = [word for member in members for word in ("--member", member)]
    run_tandem("models", "add", "mobilenets", *options, *names, "--into", into)
    return into / "mobilenets"


def test_live_is_in_process_image_by_image(mobilenets, shared_data, start_service):
    service = start_service("--model-set", str(mobilenets))
    images = ("--images", shared_data / "imagenet-small" / "images", "--max-images", NUM_IMAGES)
    report = live_report(service.url, mobilenets, *images)
    assert report["num_images"] == NUM_IMAGES
    assert report["scores"]["INT8"]["v2"]["top1"] > 0.8
    with httpx.Client(base_url=service.url, timeout=60) as client:
        check_what_is_told(client)


def check_what_is_told(client: httpx.Client) -> None:
    served = client.get("/v1/models").json()
    assert [member["input_size"] for member in served["members"]] == [224, 192, 160]
    inputs = client.get("/v2/models/mobilenets").json()["inputs"]
    assert [tensor["name"] for tensor in inputs] == ["image"]
    inputs = client.get("/v2/models/mobilenets.small").json()["inputs"]
    assert inputs[1]["shape"] == [-1, 160, 160, 3]
    pixels = {"name": "pixels", "datatype": "UINT8", "shape": [1, 1, 1, 3], "data": [1, 2, 3]}
    refused = client.post("/v2/models/mobilenets/infer", json={"inputs": [pixels]})
    assert refused.status_code == 400
    assert "several sizes" in refused.json()["error"]
