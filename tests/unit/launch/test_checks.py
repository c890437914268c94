"""What is refused before Ray starts: what does not fit the machine, TLS, ports in use."""

import math
import os
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from app.errors import ConfigError
from app.launch import checks
from app.launch.checks import HttpOptions, Tls, check_capacity, check_memory, oversubscribed, tls_of
from app.launch.config import ServeConfig
from models.model_set import load_model_set
from tests.support.cases import cases
from tests.support.configurations import with_deployment

CONFIGS = Path(__file__).parents[3] / "configs"


def with_gateway(**gateway: object) -> ServeConfig:
    application = {"import_path": "app.main:build", "deployments": [{"name": "Gateway", **gateway}]}
    return ServeConfig.of({"applications": [application]})


@pytest.mark.parametrize(
    ("name", "cpus"),
    [("laptop", 1), ("separate", 2), ("xeon-one-socket", 32), ("xeon-two-sockets", 64)],
)
def test_each_file_fits_the_machine_it_is_for_and_leaves_some(name: str, cpus: int) -> None:
    served = ServeConfig.read(CONFIGS / f"{name}.yaml")
    check_capacity(served.deployments, cpus)
    assert oversubscribed(served.deployments) is None
    if cpus >= 32:
        with pytest.raises(ConfigError, match="lower num_replicas or num_cpus"):
            check_capacity(served.deployments, cpus - 5)  # it uses what is there, but for four


@cases(
    "gateway, fits",
    ({}, 1),  # Serve's default is a CPU
    ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 9}}, 3),
    ({"num_replicas": "auto", "autoscaling_config": {"initial_replicas": 2}}, 2),
    ({"autoscaling_config": {"min_replicas": "2", "max_replicas": "3"}}, 2),
    ({"num_replicas": "auto"}, 1),
    ({"num_replicas": 3, "ray_actor_options": {"num_cpus": 0.5}}, 1.5),
    ({"num_replicas": 7, "ray_actor_options": {"num_cpus": 4}}, 28),
)
def test_what_is_asked_for(gateway: dict, fits: float) -> None:
    deployments, most = with_gateway(**gateway).deployments, math.ceil(fits) - 1
    check_capacity(deployments, most + 1)
    says = rf"asks for {fits:g} CPUs \(Gateway {fits:g}\), this machine has {most}"
    with pytest.raises(ConfigError, match=says):
        check_capacity(deployments, most)


@cases(
    "options, shares",
    ({}, "Ray and HAProxy 325, replicas (1) 126, a 300, b 200"),
    ({"num_replicas": 2}, "Ray and HAProxy 325, replicas (2) 252, a 600, b 400"),
)
def test_memory_that_is_too_small_is_refused_with_the_figures_of_each_set(options, shares) -> None:
    networks = {"a": 300 * 10**6, "b": 200 * 10**6}
    deployments = with_gateway(**options).deployments
    most = sum(int(word.strip(",")) for word in shares.split() if word.strip(",").isdigit())
    check_memory(deployments, networks, (most + 2) * 1e6)
    check_memory(deployments, networks, math.inf)  # without a group
    says = re.escape(f"MB of memory ({shares}), and its memory group gives {most - 2} MB: raise")
    with pytest.raises(ConfigError, match=says):
        check_memory(deployments, networks, (most - 2) * 1e6)


@pytest.mark.parametrize(("limit_mib", "fits"), [(900, False), (1100, False), (1200, True)])
def test_the_bundled_set_is_refused_where_it_was_killed_and_nowhere_else(limit_mib, fits) -> None:
    """A service was killed at 1,100 MiB and ran at 1,200; tandem serve has 214 itself by then."""
    networks = {"imagenette": sum(load_model_set("imagenette").memory_needed("INT8", 3).values())}
    given = (limit_mib - 214) * 2**20
    with nullcontext() if fits else pytest.raises(ConfigError, match="imagenette 50"):
        check_memory(with_gateway().deployments, networks, given)


def test_members_apart_have_their_networks_once_for_each_replica() -> None:
    deployments = [{"name": name, "num_replicas": 3} for name in ("resnet50", "densenet169")]
    with pytest.raises(ConfigError, match=r"replicas \(7\) 881, imagenette 1200"):
        check_memory([{"name": "Gateway"}, *deployments], {"imagenette": 400 * 10**6}, 10**9)


def test_replicas_that_would_share_all_cores_are_told() -> None:
    whole = with_gateway(num_replicas=2, ray_actor_options={"num_cpus": 1})
    shared = with_gateway(num_replicas=2, ray_actor_options={"num_cpus": 0.5})
    warning = oversubscribed(shared.deployments) or ""
    assert "2 replicas of Gateway have 0.5 of a CPU each" in warning
    assert oversubscribed(whole.deployments) is None


def test_a_clusters_configuration_is_not_for_one_machine() -> None:
    served = ServeConfig.read(CONFIGS / "cluster.yaml")
    says = "asks for 3 replicas of Gateway, 2 of them on a node: this is one machine; take .*laptop"
    with pytest.raises(ConfigError, match=says):
        check_capacity(served.deployments, 1000)
    for deployment in served.deployments:
        options = {k: v for k, v in deployment.items() if k != "max_replicas_per_node"}
        served = with_deployment(served, options)
    check_capacity(served.deployments, 1000)


def options_of(signed, **more):
    files = {"ssl_certfile": str(signed.certificate), "ssl_keyfile": str(signed.key)}
    more = {name: str(value) for name, value in more.items()}
    return {"host": "127.0.0.1", "port": 8000, **files, **more}


def tls(options: dict) -> Tls | None:
    return tls_of(HttpOptions.model_validate({"port": 8000} | options))


def test_a_pair_that_fits(signed, root):
    pair = tls(options_of(signed, ssl_ca_certs=root.path))
    assert (pair.certificate, pair.key) == (signed.certificate, signed.key)
    assert pair.clients == root.path
    assert tls({"host": "127.0.0.1", "ssl_certfile": None, "ssl_keyfile": None}) is None


@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_keyfile_password"])
def test_what_would_be_ignored_without_a_certificate_is_refused(name):
    with pytest.raises(ConfigError, match="give ssl_certfile and ssl_keyfile too"):
        tls({"host": "127.0.0.1", name: "x"})


def test_a_key_of_another_certificate(signed, root):
    wrong = options_of(signed, ssl_keyfile=root.sign("other").key)
    with pytest.raises(ConfigError, match=r"the key is not the certificate's \(.*service.pem"):
        tls(wrong)


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_file_that_is_missing_or_something_else(signed, tmp_path, name):
    with pytest.raises(ConfigError, match=r"No such file or directory \(.*nothing"):
        tls(options_of(signed, **{name: tmp_path / "nothing"}))
    (tmp_path / "text").write_text("this is no certificate")
    with pytest.raises(ConfigError, match=r"no certificate and key in PEM .*text"):
        tls(options_of(signed, **{name: tmp_path / "text"}))


def test_a_key_with_a_passphrase_is_told_how_to_lose_it(signed, root):
    hidden = root.sign("hidden", passphrase=b"a passphrase")
    with pytest.raises(ConfigError, match="openssl pkey"):
        tls(options_of(hidden))
    with pytest.raises(ConfigError, match="openssl pkey") as refused:
        tls(options_of(hidden, ssl_keyfile_password="a passphrase"))
    assert "a passphrase" not in str(refused.value)


@pytest.fixture
def taken():
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        yield owner.getsockname()[1]


@pytest.fixture
def usual(monkeypatch):
    port = checks.free_port()
    monkeypatch.setattr(checks, "METRICS_PORT", port)
    return port


def test_the_usual_port_unless_the_service_or_a_second_one_has_it(usual, taken, monkeypatch):
    assert checks.metrics_port(None) == usual
    assert checks.metrics_port(None, (8000, usual)) != usual
    assert checks.metrics_port(None, (8000, None)) == usual
    monkeypatch.setattr(checks, "METRICS_PORT", taken)
    assert checks.metrics_port(None) != taken
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken}.*--metrics-port"):
        checks.metrics_port(taken)


def test_another_one_if_a_second_service_is_about_to_take_it(usual):
    """Ray listens seconds later; until then nobody does, and both would find the port free."""
    code = (
        "import sys; from app.launch import checks; checks.METRICS_PORT = int(sys.argv[1])\n"
        "print(checks.metrics_port(None), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(usual)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert int(other.stdout.readline()) == usual
        assert checks.metrics_port(None) != usual
        assert checks.metrics_port(usual) == usual  # asked for: it is tried
        other.stdin.close()
    assert checks.metrics_port(None) == usual  # the other has ended


@pytest.mark.parametrize(
    ("option", "advice"), [("--port", "--host"), ("--metrics-port", "--metrics-host")]
)
@pytest.mark.parametrize("host", ["300.1.1.1", "nohost.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_no_port_in_use(host, option, advice):
    end = f"; give an address of this machine with {advice}$"
    with pytest.raises(ConfigError, match=f"^cannot listen on {host}:20000: .*{end}"):
        checks.check_port(host, 20_000, option)


def test_ports_of_which_two_are_the_same():
    checks.check_distinct({"--port": 8000, "--grpc-port": None, "--metrics-port": 9464})
    with pytest.raises(ConfigError, match="--port and --metrics-port are both 8000: give one"):
        checks.check_distinct({"--port": 8000, "--grpc-port": None, "--metrics-port": 8000})


def test_a_taken_port_names_port_process_and_remedy(taken):
    process = f"process {os.getpid()}, {psutil.Process().name()}"
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken}.*{process}.*--port"):
        checks.check_port("127.0.0.1", taken)
    with pytest.raises(ConfigError, match="in use"):
        checks.check_port("0.0.0.0", taken)


def test_free_ports_pass():
    port = checks.free_port()
    for host in ("127.0.0.1", "127.0.0.1", "localhost"):  # the check itself leaves nothing behind
        checks.check_port(host, port)
    for port in (70_000, -1):
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            checks.check_port("127.0.0.1", port)


def test_free_ports_are_not_the_kernels_to_hand_out(tmp_path, monkeypatch):
    ports = tmp_path / "range"
    ports.write_text("32768\t60999\n")
    monkeypatch.setattr(checks, "LOCAL_PORT_RANGE", ports)
    found = {checks.free_port() for _ in range(500)}
    assert len(found) == 500  # two of one process never get the same
    assert all(20_000 <= port < 32_768 or port > 60_999 for port in found)
    assert not found & set(checks.OF_REPLICAS)
    ports.write_text("1024 65535")
    assert 1024 <= checks.free_port() <= 65_535
    ports.unlink()
    assert checks.free_port() >= 20_000
