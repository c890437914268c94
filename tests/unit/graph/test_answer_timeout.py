"""An answer has less time on a cluster than HAProxy waits before it asks another Gateway."""

import pytest

from app.environment import GATEWAY_TIMEOUT, GATEWAY_TIMEOUT_S
from app.errors import ConfigError
from app.graph.service import answer_timeout_s
from app.main import build
from app.settings import Settings


@pytest.fixture
def on_a_node(monkeypatch):
    """What ``tandem environment`` sets there."""
    monkeypatch.setenv(GATEWAY_TIMEOUT, str(GATEWAY_TIMEOUT_S))


@pytest.mark.parametrize("given", [4.1, float(GATEWAY_TIMEOUT_S), 10.0])
@pytest.mark.usefixtures("on_a_node")
def test_a_gateway_that_haproxy_would_give_up_is_refused(tiny_set, given):
    told = rf"answer_timeout_s is {given:g}, and after 5 s .* set it to 4 at most, or leave it out"
    with pytest.raises(ConfigError, match=told):
        build(Settings(model_set=str(tiny_set), answer_timeout_s=given))


@pytest.mark.parametrize("given", [None, 3.9])
@pytest.mark.usefixtures("on_a_node")
def test_a_gateway_that_answers_before_is_built(tiny_set, given):
    build(Settings(model_set=str(tiny_set), answer_timeout_s=given))


@pytest.mark.parametrize(
    ("given", "request_s", "expected"), [(None, 10, 4), (3, 10, 3), (None, 2, 2), (4, 2, 2)]
)
@pytest.mark.usefixtures("on_a_node")
def test_on_a_node_it_is_less_than_haproxy_waits(given, request_s, expected):
    settings = Settings(answer_timeout_s=given, request_timeout_s=request_s)
    assert answer_timeout_s(settings) == expected


@pytest.mark.parametrize("value", [None, "", "0"])
@pytest.mark.parametrize(("given", "expected"), [(None, 10), (25, 10), (3, 3)])
def test_elsewhere_it_is_the_requests(monkeypatch, value, given, expected):
    if value is not None:
        monkeypatch.setenv(GATEWAY_TIMEOUT, value)
    settings = Settings(answer_timeout_s=given, request_timeout_s=10)
    assert answer_timeout_s(settings) == expected
