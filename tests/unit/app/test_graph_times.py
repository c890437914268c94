"""An answer has less time on a cluster than HAProxy waits before it asks another Gateway."""

import pytest

from app.environment import GATEWAY_TIMEOUT, GATEWAY_TIMEOUT_S
from app.errors import ConfigError
from app.main import build
from app.settings import Settings


@pytest.mark.parametrize("answer_s", [float(GATEWAY_TIMEOUT_S), 10.0])
def test_a_gateway_that_haproxy_would_give_up_is_refused(tiny_set, monkeypatch, answer_s):
    monkeypatch.setenv(GATEWAY_TIMEOUT, str(GATEWAY_TIMEOUT_S))
    told = rf"answer_timeout_s is {answer_s:g}, and after 5 s .* set it below, to 4 for example"
    with pytest.raises(ConfigError, match=told):
        build(Settings(model_set=str(tiny_set), answer_timeout_s=answer_s))


@pytest.mark.parametrize(("limit", "answer_s"), [(str(GATEWAY_TIMEOUT_S), 4.9), ("", 10.0)])
def test_a_gateway_that_answers_before_is_built(tiny_set, monkeypatch, limit, answer_s):
    monkeypatch.setenv(GATEWAY_TIMEOUT, limit)
    build(Settings(model_set=str(tiny_set), answer_timeout_s=answer_s))
