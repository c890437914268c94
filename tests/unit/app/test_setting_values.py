"""The setting cache: redis://..."""

import pytest

from app.setting_values import RedisAddress
from tests.support.cases import cases


@cases(
    "given, url",
    ("redis://10.0.0.5:6379/2", "redis://10.0.0.5:6379/2"),
    ("redis://cache:6379", "redis://cache:6379/0"),
    ("redis://[::1]:6379/", "redis://[::1]:6379/0"),
    ("rediss://cache:6380/1", "rediss://cache:6380/1"),
)
def test_an_address(given, url):
    address = RedisAddress.of(given)
    assert (address.url, address.shown) == (url, url)


def test_a_password_is_used_and_not_shown():
    address = RedisAddress.of("redis://user:s3cret@cache:6379/1")
    assert address.url == "redis://user:s3cret@cache:6379/1"
    assert address.shown == "redis://cache:6379/1"


@cases(
    "given, says",
    ("redis://", "no host or no port"),
    ("redis://cache", "no host or no port"),
    ("redis://:s3cret@:6379", "no host or no port"),
    ("redis://cache:0/1", "no host or no port"),
    ("http://cache:6379/1", "no host or no port"),
    ("redis://:s3cret@cache:66379/1", "port is no number"),
    ("redis://cache:s3cret", "port is no number"),
    ("redis://[::1:6379/1", "port is no number"),
    ("redis://cache:6379/s3cret", "number of a database"),
    ("redis://cache:6379/1/2", "number of a database"),
    ("redis://cache:6379/-1", "number of a database"),
    ("redis://cache:6379/\u00b2", "number of a database"),
    ("redis://cache:6379/1?password=s3cret", "number of a database"),
)
def test_what_is_none_is_refused_without_a_password_in_the_message(given, says):
    with pytest.raises(ValueError, match=says) as caught:
        RedisAddress.of(given)
    assert "redis://HOST:PORT/DB" in str(caught.value)
    assert "s3cret" not in str(caught.value)
