"""The examples of one's own stages through the real command.

In the fast tier: tests/unit/functions, with the real graph on tiny networks.
"""

from typing import Any

import cv2
import httpx
import numpy as np
import pytest

from tests.support.services.live_service import changed_config, drawn_photo

pytestmark = pytest.mark.slow


def test_a_majority_vote(start_service, photo):
    service = start_service("--config", "configs/majority-vote.yaml")
    with httpx.Client(base_url=service.url, timeout=60) as client:
        models = client.get("/v1/models").json()
        answer = client.post("/v1/classify?top_k=10", content=photo).json()
    assert models["combine"] == "configs.functions.majority_vote:majority_vote"
    firsts = [member["predictions"][0]["index"] for member in answer["members"].values()]
    rows = row_of(answer["predictions"])
    assert sum(rows.values()) == pytest.approx(1, abs=1e-3)
    for index in set(firsts):
        assert rows[index] == pytest.approx(firsts.count(index) / len(firsts), abs=0.011)


def test_mirroring_and_a_failing_vote_in_a_combiner_of_its_own(start_service, tmp_path):
    with changed_config(tmp_path, "configs/mirroring.yaml") as content:
        arguments = {"combine": "tests.support.own_functions:vote_on_few", "combiner": "deployment"}
        content["applications"][0]["args"] |= arguments
    service = start_service("--config", str(tmp_path / "mirroring.yaml"))
    drawn: Any = cv2.imdecode(np.frombuffer(drawn_photo(width=292, height=292), np.uint8), 1)
    files = [cv2.imencode(".png", image)[1].tobytes() for image in (drawn, drawn[:, ::-1])]
    with httpx.Client(base_url=service.url, timeout=60) as client:
        form = [("files", (f"{i}.png", files[0])) for i in range(4)]
        failed = client.post("/v1/classify", files=form)
        answers = [client.post("/v1/classify?top_k=10", content=file).json() for file in files]
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "function")
    assert "own_functions:vote_on_few" in failed.json()["error"]["message"]
    assert "own words" not in failed.text
    stages = {stage["stage"] for stage in answers[0]["timings_ms"]["stages"]}
    assert {"decode", "preprocess", "infer", "combine"} <= stages
    for name, member in answers[0]["members"].items():  # a picture and its mirror image are one
        same = answers[1]["members"][name]["predictions"]
        first, second = map(row_of, (member["predictions"], same))
        assert first == pytest.approx(second, abs=0.01)


def row_of(predictions: list[dict]) -> dict[int, float]:
    return {p["index"]: p["probability"] for p in predictions}
