"""The examples of one's own stages through the real command.

In the fast tier: tests/unit/functions, with the real graph on tiny networks.
"""

from collections.abc import Callable
from pathlib import Path

import cv2
import httpx
import numpy as np
import pytest

from tests.support.services.live_service import Start, changed_config, drawn_photo

pytestmark = pytest.mark.slow


def test_a_majority_vote_in_a_combiner_of_its_own(
    start_service: Start, tmp_path: Path, photo: bytes
) -> None:
    with changed_config(tmp_path, "configs/majority-vote.yaml") as content:
        content["applications"][0]["args"]["combiner"] = "deployment"
    service = start_service("--config", str(tmp_path / "majority-vote.yaml"))
    service.wait_ready()
    with httpx.Client(base_url=service.url, timeout=60) as client:
        models = client.get("/v1/models").json()
        answer = client.post("/v1/classify?top_k=10", content=photo).json()
    assert models["combine"] == "configs.functions.majority_vote:majority_vote"
    firsts = [member["predictions"][0]["index"] for member in answer["members"].values()]
    rows = {p["index"]: p["probability"] for p in answer["predictions"]}
    assert sum(rows.values()) == pytest.approx(1, abs=1e-3)
    for index in set(firsts):
        share = firsts.count(index) / len(firsts)
        assert rows[index] == pytest.approx(share, abs=0.011)


def test_a_picture_and_its_mirror_image_have_one_answer(
    start_service: Start, free_port: Callable[[], int]
) -> None:
    service = start_service("--config", "configs/mirroring.yaml")
    service.wait_ready()
    drawn = cv2.imdecode(np.frombuffer(drawn_photo(width=292, height=292), np.uint8), 1)
    files = [cv2.imencode(".png", image)[1].tobytes() for image in (drawn, drawn[:, ::-1])]
    with httpx.Client(base_url=service.url, timeout=60) as client:
        answers = [client.post("/v1/classify?top_k=10", content=file).json() for file in files]
    stages = {stage["stage"] for stage in answers[0]["timings_ms"]["stages"]}
    assert {"decode", "preprocess", "infer", "combine"} <= stages
    rows = [{p["index"]: p["probability"] for p in a["predictions"]} for a in answers]
    for index, probability in rows[0].items():
        assert rows[1][index] == pytest.approx(probability, abs=0.01)
