"""Shared memory at a start: refused where callers may be elsewhere."""

import os
from pathlib import Path

import pytest

from app.environment import REGIONS_FOLDER
from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.shared_memory import check_shared_memory, make_regions_folder

ON = {"shared_memory": True}


@pytest.fixture
def config() -> ServeConfig:
    return ServeConfig.read(Path("serve_config.yaml"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_listener_on_loopback(config, host):
    check_shared_memory(config.with_overrides(host=host).with_arguments(**ON), is_joining=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "127.0.0.1.example"])
def test_a_listener_that_others_reach_is_refused(config, host):
    changed = config.with_overrides(host=host)
    check_shared_memory(changed, is_joining=False)
    with pytest.raises(ConfigError, match=f"listens on {host}: callers of other machines"):
        check_shared_memory(changed.with_arguments(**ON), is_joining=False)


def test_a_cluster_is_refused(config):
    check_shared_memory(config, is_joining=True)
    with pytest.raises(ConfigError, match="with --address"):
        check_shared_memory(config.with_arguments(**ON), is_joining=True)


def test_the_gateways_are_told_of_a_folder_that_only_this_user_enters(
    config, tmp_path, monkeypatch
):
    monkeypatch.setenv(REGIONS_FOLDER, "another run's")
    make_regions_folder(config, tmp_path)
    assert list(tmp_path.iterdir()) == []
    make_regions_folder(config.with_arguments(**ON), tmp_path)
    folder = Path(os.environ[REGIONS_FOLDER])
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
