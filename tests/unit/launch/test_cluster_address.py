"""An address of a cluster that is none, or at which nobody listens, is a line and no waiting."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.launch.ray_cluster import check_address


def test_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        check_address(f"127.0.0.1:{head.getsockname()[1]}")


def test_nobody_listens(free_port: Callable[[], int]) -> None:
    address = f"127.0.0.1:{free_port()}"
    told = f"^no Ray cluster at {address}: Connection refused; start one with ray start --head"
    with pytest.raises(ConfigError, match=told):
        check_address(address)


@pytest.mark.parametrize("address", ["foo", "ray://head:10001", "http://head:8265", "head:", ":1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--address .* is no address; give auto, or HOST:PORT"):
        check_address(address)


def test_a_client_comes_from_outside_where_it_may() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        check_address(f"ray://127.0.0.1:{head.getsockname()[1]}", may_be_client=True)
    with pytest.raises(ConfigError, match=r"foo is no address; .*, or ray://HOST:10001 from"):
        check_address("foo", may_be_client=True)


def test_a_port_beyond_all() -> None:
    with pytest.raises(ConfigError, match=r"no Ray cluster at 127\.0\.0\.1:99999"):
        check_address("127.0.0.1:99999")


def test_auto_is_the_last_cluster_which_may_be_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    check_address("auto")  # there was none: Ray itself says so
    gone = f"127.0.0.1:{free_port()}"
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(gone)
    with pytest.raises(ConfigError, match=f"no Ray cluster at {gone}"):
        check_address("auto")
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(ConfigError, match="--address auto: nonsense is no address"):
        check_address("auto")
