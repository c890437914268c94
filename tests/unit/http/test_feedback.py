"""POST and GET /v1/feedback: answers, refusals, keys, and the metric."""

from collections.abc import AsyncIterator

import httpx
import pytest

from app.errors import MAX_SHOWN
from app.http.api import create_api
from app.samples import feedback as gateways
from app.samples.feedback import Feedback, FeedbackBook
from app.serve.replica import Hub
from app.settings import Settings
from app.telemetry.metric_table import FEEDBACK
from tests.support.answers import answer_of
from tests.support.fakes import FakeHandle, FakeService
from tests.support.instruments import Instruments


class Labelled(FakeService):
    """A service whose one set has two labels."""

    def sets_with(self, label: str) -> list[str]:
        return ["fake"] if label in ("x", "y") else []


@pytest.fixture
def feedback(monkeypatch: pytest.MonkeyPatch) -> Feedback:
    monkeypatch.setattr("app.serve.replica.start_replica", lambda _: None)
    monkeypatch.setattr(gateways, "SEND_EVERY_S", 0.01)
    return Feedback(FakeHandle(Hub(Settings(), FeedbackBook(50_000))))


@pytest.fixture
async def client(feedback: Feedback) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_api(Labelled(), feedback=feedback))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_a_label_is_counted_once(
    client: httpx.AsyncClient, feedback: Feedback, told: Instruments
) -> None:
    feedback.note("1", [b""], [answer_of()])
    feedback.note("2", [b""], [answer_of()])
    for _ in range(2):
        answer = await client.post("/v1/feedback", json={"request_id": "1", "label": "x"})
        assert answer.status_code == 200
        assert answer.json() == {
            "request_id": "1",
            "label": "x",
            "answered": ["x"],
            "right": True,
            "model_set": "fake",
            "model_version": "0123456789ab",
        }
    await client.post("/v1/feedback", json={"request_id": "2", "label": "y", "image": 0})
    assert told.of(FEEDBACK) == {("yes", "0123456789ab"): 1.0, ("no", "0123456789ab"): 1.0}
    figures = (await client.get("/v1/feedback")).json()
    assert figures["versions"] == [
        {
            "model_set": "fake",
            "model_version": "0123456789ab",
            "feedback": 2,
            "right": 1,
            "accuracy": 0.5,
            "interval": [0.0945, 0.9055],
        }
    ]
    assert (figures["remembered_answers"], figures["max_answers"]) == (2, 50_000)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"request_id": "9", "label": "x"}, 404, "no request '9' is remembered"),
        ({"request_id": "1", "label": "z"}, 422, "'z' is no label of fake"),
        ({"request_id": "1"}, 422, "label: Field required; send {"),
        ({"request_id": "1", "label": 3}, 422, "label: Input should be a valid string"),
        ({"request_id": "1", "label": "x", "image": "0"}, 422, "image: Input should be a valid"),
        ({"request_id": "1", "label": "x", "image": 4}, 422, "image is 4, and this request has 1"),
        ({"request_id": "1", "label": "x", "labels": []}, 422, "labels: Extra inputs"),
        ({"request_id": "1", "label": "x", "k" * 99: 0}, 422, f"{'k' * MAX_SHOWN}: Extra inputs"),
        ([], 422, "the body is no object; send"),
    ],
)
async def test_what_is_refused(
    client: httpx.AsyncClient, feedback: Feedback, body: object, status: int, message: str
) -> None:
    feedback.note("1", [b""], [answer_of()])
    answer = await client.post("/v1/feedback", json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


async def test_another_label_is_a_conflict(client: httpx.AsyncClient, feedback: Feedback) -> None:
    feedback.note("1", [b""], [answer_of()])
    first, second = [
        await client.post("/v1/feedback", json={"request_id": "1", "label": label})
        for label in ("x", "y")
    ]
    assert (first.status_code, second.status_code) == (200, 409)
    assert second.json()["error"]["code"] == "feedback_exists"


@pytest.mark.parametrize("verb", ["GET", "POST"])
async def test_a_service_that_takes_none_says_so(verb: str) -> None:
    transport = httpx.ASGITransport(create_api(FakeService()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.request(verb, "/v1/feedback", json={})
    assert answer.status_code == 404
    assert "start it with feedback: true" in answer.json()["error"]["message"]


@pytest.mark.parametrize("verb", ["GET", "POST"])
async def test_a_service_with_keys_wants_one(
    verb: str, feedback: Feedback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEYS", "a-long-enough-key-of-mine")
    transport = httpx.ASGITransport(create_api(Labelled(), feedback=feedback))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.request(verb, "/v1/feedback", json={})).status_code == 401
