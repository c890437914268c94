"""``tandem serve`` and who may call: mistakes are told before Ray starts, the state after."""

from pathlib import Path

import pytest

from app.access.api_keys import ApiKeyError
from app.errors import ConfigError
from app.launch.deploy import client_of, wants_key
from app.launch.resolved_config import ServeOptions
from app.launch.serve import _checked_config, _exposure

KEY = "k" * 32


@pytest.fixture
def options(tiny_set, free_port):
    return {"model_set": str(tiny_set), "port": free_port()}


def test_the_file_of_keys_is_found_wherever_a_replica_runs(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text(KEY)
    config = _checked_config(ServeOptions(**options, api_keys_file=Path("keys")))
    arguments = config.content["applications"][0]["args"]
    assert arguments["api_keys_file"] == str(tmp_path / "keys")
    assert KEY not in str(config)


def test_keys_that_are_none_are_told_at_once(options, tmp_path, monkeypatch):
    with pytest.raises(ApiKeyError, match="cannot read the keys of"):
        _checked_config(ServeOptions(**options, api_keys_file=tmp_path / "nothing"))
    monkeypatch.setenv("TANDEM_API_KEYS", "short")
    with pytest.raises(ApiKeyError, match="TANDEM_API_KEYS, line 1: a key of 5 characters"):
        _checked_config(ServeOptions(**options))


def test_a_clusters_keys_are_on_its_nodes(options, tmp_path):
    there = tmp_path / "only on the nodes"
    config = _checked_config(ServeOptions(**options, address="auto", api_keys_file=there))
    assert config.content["applications"][0]["args"]["api_keys_file"] == str(there)


@pytest.mark.parametrize("host", ["", "a b"])
def test_an_address_of_the_metrics_that_is_none(options, host):
    """A socket bound to an empty text listens on all interfaces."""
    with pytest.raises(ConfigError, match=f"--metrics-host is '{host}': give an address"):
        _checked_config(ServeOptions(**options, metrics_host=host))


@pytest.mark.parametrize(("status", "wants"), [(401, True), (200, False), (503, False)])
def test_the_service_itself_is_asked(server, status, wants):
    server.get = (status, b"{}")
    assert wants_key(client_of(server.url)) is wants
    assert server.requests == [("/v1/models", b"")]


def test_a_service_that_is_gone_wants_nothing():
    assert wants_key(client_of("http://127.0.0.1:1")) is False


def test_what_others_can_do_is_said():
    alone = _exposure("0.0.0.0", False, "http://127.0.0.1:8000")
    assert "every machine that reaches this one may call; --api-keys-file" in alone
    assert "others can read it on the way" in alone
    guarded = _exposure("0.0.0.0", True, "https://127.0.0.1:8000")
    assert guarded.endswith("may call with a key")
