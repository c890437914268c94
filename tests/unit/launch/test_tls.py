"""TLS by Serve's options: every mistake is told before Ray starts, and HAProxy takes the rest."""

import ssl
import subprocess

import pytest
import uvicorn
from app.launch.front import put_haproxy_in_front
from app.launch.haproxy.command import EX_CONFIG, HaproxyCommand

from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.http_options import HttpOptions, Tls, tls_of
from tests.support.certificates import Root
from tests.support.haproxy_configs import write_serves_config

APPLICATIONS = [{"import_path": "app.main:build"}]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return Root(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def signed(root):
    return root.sign("service")


def options(signed, **more):
    return {
        "host": "127.0.0.1",
        "port": 8000,
        "ssl_certfile": str(signed.certificate),
        "ssl_keyfile": str(signed.key),
        **{name: str(value) for name, value in more.items()},
    }


def tls(options: dict) -> Tls | None:
    return tls_of(HttpOptions.model_validate({"port": 8000} | options))


def served(options: dict) -> ServeConfig:
    return ServeConfig.of({"http_options": options, "applications": APPLICATIONS})


def test_without_the_options_there_is_none():
    assert tls({"host": "127.0.0.1", "ssl_certfile": None, "ssl_keyfile": None}) is None


@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_keyfile_password"])
def test_what_would_be_ignored_without_a_certificate_is_refused(name):
    with pytest.raises(ConfigError, match="give ssl_certfile and ssl_keyfile too"):
        tls({"host": "127.0.0.1", name: "x"})


def test_a_pair_that_fits(signed, root):
    found = tls(options(signed, ssl_ca_certs=root.path))
    assert (found.certificate, found.key) == (signed.certificate, signed.key)
    assert found.clients == root.path


def test_serve_itself_gets_none_of_it(signed, root):
    config = served(options(signed, ssl_ca_certs=root.path))
    assert config.without_tls().as_dict()["http_options"] == {
        "host": "127.0.0.1",
        "port": 8000,
    }


def test_a_key_of_another_certificate(signed, root):
    wrong = options(signed) | {"ssl_keyfile": str(root.sign("other").key)}
    with pytest.raises(ConfigError, match=r"the key is not the certificate's \(.*service.pem"):
        tls(wrong)


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_file_that_is_missing_or_something_else(signed, tmp_path, name):
    with pytest.raises(ConfigError, match=r"No such file or directory \(.*nothing"):
        tls(options(signed) | {name: str(tmp_path / "nothing")})
    (tmp_path / "text").write_text("this is no certificate")
    with pytest.raises(ConfigError, match=r"no certificate and key in PEM .*text"):
        tls(options(signed) | {name: str(tmp_path / "text")})


def test_a_key_with_a_passphrase_is_told_how_to_lose_it(signed, root):
    hidden = root.sign("hidden", passphrase=b"a passphrase")
    with pytest.raises(ConfigError, match="openssl pkey"):
        tls(options(hidden))
    with pytest.raises(ConfigError, match="openssl pkey") as refused:
        tls(options(hidden, ssl_keyfile_password="a passphrase"))
    assert "a passphrase" not in str(refused.value)


def test_haproxy_takes_the_configuration(signed, root, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    command = HaproxyCommand(run / "haproxy", (9101, 8404))
    command.write()
    config, grpc_port = run / "haproxy.cfg", 9000
    for asked in (None, tls(options(signed, ssl_ca_certs=root.path))):
        command.write(asked)
        write_serves_config(config, grpc_port=grpc_port, replicas={"http": 1, "grpc": 2})
        checked = subprocess.run(
            [command.path, "-c", "-f", config], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
    lines = [line for line in config.read_text().splitlines() if line.lstrip().startswith("bind ")]
    bound = [line for line in lines if ":9101" not in line and ":8404" not in line]
    assert bound.pop(0) == f"    bind unix@{run}/local.sock mode 600 # tandem http_frontend"
    assert (
        bound.pop(1)
        == f"    bind unix@{run}/local-grpc.sock mode 600 proto h2 # tandem grpc_frontend"
    )
    assert bound[0].startswith(f"    bind 127.0.0.1:8000 ssl crt {run}/tls.pem alpn")
    assert bound[0].endswith("verify required")
    assert bound[1].startswith(f"    bind 127.0.0.1:9000 ssl crt {run}/tls.pem alpn h2 ca-file")
    assert len(bound) == 2
    assert (run / "tls.pem.key").readlink() == signed.key


@pytest.mark.parametrize("port", [8001, 8443])
def test_haproxy_is_not_started_with_a_port_in_clear(signed, tmp_path, port):
    command = HaproxyCommand(tmp_path / "haproxy", (9101, 8404))
    command.write(tls(options(signed)))
    config = write_serves_config(tmp_path / "haproxy.cfg")
    first = "    bind 127.0.0.1:8000\n"
    text = config.read_text()
    assert first in text
    config.write_text(text.replace(first, f"{first}    bind 127.0.0.1:{port}\n"))
    checked = subprocess.run(
        [command.path, "-c", "-f", config], capture_output=True, text=True, check=False
    )
    assert checked.returncode == EX_CONFIG
    assert "lacks TLS on every port that others reach" in checked.stderr


def test_the_service_speaks_tls_in_serves_place(signed, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    config = served(options(signed))
    assert config.url.startswith("https:")
    command = HaproxyCommand(tmp_path / "haproxy", (1, 2))
    left = put_haproxy_in_front(config, command, is_joining=False)
    assert left.as_dict()["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert "ssl crt" in (tmp_path / "edits.sed").read_text()
    assert left.url.startswith("http:")
    assert put_haproxy_in_front(left, command, is_joining=False) == left
    assert "ssl crt" not in (tmp_path / "edits.sed").read_text()


def test_a_clusters_haproxy_does_none(signed, tmp_path, monkeypatch):
    command = HaproxyCommand(tmp_path / "haproxy", (1, 2))
    config = served(options(signed))
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(ConfigError, match="RAY_SERVE_ENABLE_HA_PROXY=0"):
        put_haproxy_in_front(config, command, is_joining=True)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    # Serve's own proxy takes them.
    assert put_haproxy_in_front(config, command, is_joining=True) == config
    assert config.url.startswith("https:")


def test_serves_own_proxy_does_none_for_grpc(signed, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    config = served(options(signed)).with_overrides(grpc_port=9000)
    command = HaproxyCommand(tmp_path / "haproxy", (1, 2))
    with pytest.raises(ConfigError, match="gRPC would go in clear"):
        put_haproxy_in_front(config, command, is_joining=False)


@pytest.mark.parametrize("address", [None, "auto"])
def test_serves_own_proxy_asks_no_client_for_a_certificate(
    signed, root, tmp_path, monkeypatch, address
):
    """It hands uvicorn the roots, and not that a certificate is needed."""
    assert uvicorn.Config(app="", ssl_ca_certs=str(root.path)).ssl_cert_reqs == ssl.CERT_NONE
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    config = served(options(signed, ssl_ca_certs=root.path))
    command = HaproxyCommand(tmp_path / "haproxy", (1, 2))
    with pytest.raises(ConfigError, match="lets in clients without a certificate all the same"):
        put_haproxy_in_front(config, command, is_joining=address is not None)
