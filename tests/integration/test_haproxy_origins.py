"""The real HAProxy's own answers, as pages of other origins see them."""

import httpx
import pytest

from app.setting_values import EXPOSED
from tests.support.cases import cases
from tests.support.haproxy_process import ORIGIN, haproxy_before

ALLOWED = "access-control-allow-origin"
OTHER = "https://other.example"


@pytest.fixture(scope="module")
def client(free_port, tmp_path_factory):
    """A client of an HAProxy with nobody behind it."""
    front = free_port()
    url, patient = f"http://127.0.0.1:{front}", httpx.HTTPTransport(retries=9)
    with (
        haproxy_before(front, free_port(), tmp_path_factory.mktemp("haproxy")),
        httpx.Client(base_url=url, trust_env=False, timeout=30, transport=patient) as client,
    ):
        assert client.get("/healthz").status_code == 503
        yield client


@cases(
    "status, method, path, headers",
    (503, "POST", "/v1/classify", {}),  # there is no Gateway
    (405, "BREW", "/v1/classify", {}),
    (400, "GET", "/v1/models", {"x-long": "x" * 15_500}),
)
def test_a_page_that_may_call_reads_haproxys_errors(client, status, method, path, headers):
    answer = client.request(method, path, headers=headers | {"origin": ORIGIN})
    assert (answer.status_code, answer.headers.get(ALLOWED)) == (status, ORIGIN)
    assert answer.headers["vary"] == "Origin"
    assert answer.headers["access-control-expose-headers"] == ", ".join(EXPOSED)
    for origin in ({"origin": OTHER}, {"origin": f"{ORIGIN}.evil"}, {}):
        refused = client.request(method, path, headers=headers | origin)
        assert refused.status_code == status
        assert ALLOWED not in refused.headers


def test_another_applications_answers_are_its_own(client):
    answer = client.get("/other/thing", headers={"origin": ORIGIN})
    assert answer.status_code == 503
    assert ALLOWED not in answer.headers
