"""The address that clients reach is HAProxy's; Serve and the Gateways stay on 127.0.0.1."""

import subprocess
from pathlib import Path

import pytest
from app.launch.front import check_shared_memory, check_unprotected, put_haproxy_in_front
from app.launch.haproxy.command import HaproxyCommand

from app.errors import ConfigError
from app.launch.config import ServeConfig
from tests.support.certificates import Root
from tests.support.configurations import GOOD
from tests.support.haproxy_configs import PORTS, write_serves_config

SHIPPED = ServeConfig.read(Path("serve_config.yaml"))
HOSTS = ("::1", "::", "127.0.0.1", "0.0.0.0", "localhost")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HaproxyCommand:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    return HaproxyCommand(tmp_path / "haproxy.sh", PORTS)


def binds(command: HaproxyCommand, folder: Path, grpc_port: int) -> list[str]:
    """Return where HAProxy listens for clients, by the file that it then takes as valid."""
    file = write_serves_config(folder / "haproxy.cfg", grpc_port=grpc_port)
    edits = command.path.with_name("edits.sed")
    subprocess.run(["sed", "-i", "-E", "-f", edits, file], check=True)
    checked = subprocess.run([command.path, "-c", "-f", file], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    lines = [line.split() for line in file.read_text().splitlines()]
    others = ("unix@", *(f"127.0.0.1:{port}" for port in PORTS))
    return [w[1] for w in lines if w[:1] == ["bind"] and not w[1].startswith(others)]


@pytest.mark.parametrize("host", HOSTS)
def test_haproxy_alone_listens_at_the_host(
    command: HaproxyCommand, tmp_path: Path, host: str
) -> None:
    asked = ServeConfig.of(GOOD).with_overrides(host=host, grpc_port=9000)
    left = put_haproxy_in_front(asked, command, is_joining=False)
    assert left.http.host == "127.0.0.1"
    assert binds(command, tmp_path, 9000) == [f"{host}:8000", f"{host}:9000"]


def test_with_tls_too(command: HaproxyCommand, tmp_path: Path) -> None:
    signed = Root(tmp_path).sign("service")
    files = {"ssl_certfile": str(signed.certificate), "ssl_keyfile": str(signed.key)}
    config = ServeConfig.of(GOOD).with_http_options(**files)
    asked = config.with_overrides(host="::", grpc_port=9000)
    put_haproxy_in_front(asked, command, is_joining=False)
    assert binds(command, tmp_path, 9000) == [":::8000", ":::9000"]
    assert (tmp_path / "haproxy.cfg").read_text().count("bind :::") == 2


@pytest.mark.parametrize(("model_set", "limit"), [("a", 128), ("a,b,c", 384)])
def test_haproxy_leaves_it_to_the_gateway_to_refuse_one_of_several_sets(
    command: HaproxyCommand, model_set: str, limit: int
) -> None:
    asked = ServeConfig.of(GOOD).with_overrides(model_set=model_set)
    put_haproxy_in_front(asked, command, is_joining=False)
    edits = command.path.with_name("edits.sed").read_text("ascii")
    assert f"set-var(txn.limit) int({limit})" in edits


def test_a_clusters_haproxy_is_serves_own_matter(command: HaproxyCommand) -> None:
    asked = ServeConfig.of(GOOD).with_overrides(host="0.0.0.0")
    assert put_haproxy_in_front(asked, command, is_joining=True) == asked


@pytest.mark.parametrize(
    ("host", "url", "is_on_loopback"),
    [
        ("::1", "http://[::1]:8000", True),
        ("::", "http://[::1]:8000", False),
        ("0.0.0.0", "http://127.0.0.1:8000", False),
        ("127.0.0.2", "http://127.0.0.2:8000", True),
        ("localhost", "http://localhost:8000", True),
        ("10.0.0.7", "http://10.0.0.7:8000", False),
    ],
)
def test_where_this_machine_reaches_the_service(host: str, url: str, is_on_loopback: bool) -> None:
    config = ServeConfig.of(GOOD).with_overrides(host=host)
    assert config.url == url
    assert config.http.is_on_loopback is is_on_loopback


def test_an_empty_host_is_none() -> None:
    with pytest.raises(ConfigError, match=r"http_options\.host is '': give an address"):
        ServeConfig.of(GOOD).with_overrides(host="")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_shared_memory_of_a_listener_on_loopback(host):
    check_shared_memory(
        SHIPPED.with_overrides(host=host).with_arguments(shared_memory="unproxied"),
        is_joining=False,
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "127.0.0.1.example"])
def test_shared_memory_of_a_listener_that_others_reach_is_refused(host):
    changed = SHIPPED.with_overrides(host=host)
    check_shared_memory(changed, is_joining=False)
    with pytest.raises(ConfigError, match=f"listens on {host}: callers of other machines"):
        check_shared_memory(changed.with_arguments(shared_memory="unproxied"), is_joining=False)


def test_shared_memory_of_a_cluster_is_refused():
    check_shared_memory(SHIPPED, is_joining=True)
    with pytest.raises(ConfigError, match="with --address"):
        check_shared_memory(SHIPPED.with_arguments(shared_memory="unproxied"), is_joining=True)


def test_without_a_linux_there_is_no_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("app.launch.front.FOLDER", tmp_path / "shm")
    with pytest.raises(ConfigError, match=r"shm, and this system has none: leave it out"):
        check_shared_memory(SHIPPED.with_arguments(shared_memory="unproxied"), is_joining=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_without_haproxy_a_service_on_loopback_is_warned_of(host, monkeypatch):
    config = SHIPPED.with_overrides(host=host)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert check_unprotected(config) is None
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    assert "nothing limits connections, slow headers" in str(check_unprotected(config))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "127.0.0.1.example"])
def test_without_haproxy_nobody_else_reaches_it(host, monkeypatch):
    config = SHIPPED.with_overrides(host=host)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert check_unprotected(config) is None
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    with pytest.raises(ConfigError, match=f"host is {host}, and without HAProxy"):
        check_unprotected(config)
