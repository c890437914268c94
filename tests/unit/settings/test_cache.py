"""The settings of the response cache."""

import pytest
from pydantic import ValidationError

from app.errors import ConfigError
from app.launch.config_check import checked_content
from app.setting_values import check_redis_client
from app.settings import Settings


@pytest.mark.parametrize("cache", ["none", "local", "redis://10.0.0.5:6379/1", "rediss://c:1"])
def test_where_answers_may_be_kept(cache):
    assert Settings(cache=cache).cache == cache


def test_nothing_is_kept_unless_it_is_asked_for():
    assert Settings().cache == "none"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("cache", "memory", "cache is 'memory': give none, local, or redis://HOST:PORT/DB"),
        ("cache", "", "give none, local, or"),
        ("cache", None, "valid string"),
        ("cache", True, "valid string"),
        ("cache", "redis://cache", "no host or no port"),
        ("cache", "redis://cache:6379/one", "number of a database"),
        ("cache_mib", 0, "greater than or equal to 1"),
        ("cache_mib", 2**16 + 1, "less than or equal to 65536"),
        ("cache_mib", "much", "valid integer"),
    ],
)
def test_what_is_refused(name, value, says):
    with pytest.raises(ValidationError, match=says) as caught:
        Settings.model_validate({name: value})
    assert name in str(caught.value)


def test_a_file_with_a_bad_cache_is_refused_without_its_password():
    application = {"import_path": "app.main:build", "args": {"cache": "redis://:s3cret@c:x/1"}}
    with pytest.raises(ConfigError, match="its port is no number") as caught:
        checked_content({"applications": [application]}, "serve_config.yaml")
    assert "s3cret" not in str(caught.value)


def test_a_redis_wants_its_client(monkeypatch):
    monkeypatch.setattr("app.setting_values.find_spec", lambda _: None)
    for cache in ("none", "local"):
        check_redis_client(cache)
    with pytest.raises(ConfigError, match=r"pip install 'tandem-serve\[redis\]'"):
        check_redis_client("redis://cache:6379/1")


@pytest.mark.parametrize("cache", ["redis://u:s3cret@cache:none/0", "redsi://:s3cret@cache:1/0"])
def test_what_serve_prints_of_a_bad_address_has_no_password(cache):
    """``serve deploy`` shows the error as pydantic words it."""
    with pytest.raises(ValidationError) as raised:
        Settings(cache=cache)
    assert "s3cret" not in str(raised.value)
