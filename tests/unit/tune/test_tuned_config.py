"""The file that is written: valid, explained, whole."""

from pathlib import Path

import pytest
import yaml

from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.settings import Settings
from app.tune.config import as_yaml, check_place, request_limit, tuned
from tests.support.points import point

PROJECT = Path(__file__).parents[3]
BASE = ServeConfig.read(PROJECT / "serve_config.yaml")
MACHINE = {"measured": "2026-01-01T00:00:00+00:00", "cpu": "a CPU", "cores": 8, "command": "tandem"}


def gateway_of(config: ServeConfig) -> dict:
    return config.deployment("Gateway")


def written(tmp_path: Path, *, p99_ms: float | None = None, **facts) -> ServeConfig:
    chosen = point(100, 50, **facts)
    path = tmp_path / "tuned.yaml"
    path.write_text(as_yaml(tuned(BASE, chosen, [], p99_ms), chosen, MACHINE, p99_ms))
    return ServeConfig.read(path)


@pytest.mark.parametrize("p99_ms", [None, 80.0])
@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_what_is_written_is_valid_and_what_was_measured(tmp_path, replicas, p99_ms):
    config = written(tmp_path, replicas=replicas, cores=4, clients=40, p99_ms=p99_ms)
    arguments = config.as_dict()["applications"][0]["args"]
    assert arguments["streams"] == 1
    assert arguments["batch_sizes"] == [1, 2, 4]
    assert arguments.get("affinity", False) is (replicas > 1)  # as they were measured
    gateway = gateway_of(config)
    assert gateway.get("num_replicas", 1) == replicas
    assert gateway["ray_actor_options"]["num_cpus"] == (0.5 if replicas == 1 else 4)
    assert gateway["max_ongoing_requests"] > arguments["max_concurrent_requests"]
    assert config.http == BASE.http
    assert config.content["http_options"] == BASE.content["http_options"]


def test_the_given_configuration_stays_as_it_was():
    before = BASE.as_dict()
    tuned(BASE, point(100, 50, replicas=2, cores=1), [], 80.0)
    assert BASE.as_dict() == before


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_limit_is_the_most_clients_that_were_measured_within_the_p99(replicas):
    """Between 32 clients (78 ms) and 64 (190 ms) nothing is known, nor is it beyond 64."""

    def at(clients: int, p99_ms: float, **facts):
        return point(100, p99_ms, clients=clients, replicas=replicas, **facts)

    chosen = at(16, 50)
    points = [at(1, 20), chosen, at(32, 78), at(64, 190), at(128, 70, sizes=(1, 3)), at(256, 900)]
    for p99_ms, clients in ((50, 16), (77, 16), (80, 32), (189, 32), (200, 64), (5000, 256)):
        assert request_limit(chosen, points, p99_ms, 256) == max(2, clients // replicas)


def test_one_at_a_time_would_refuse_its_own_page():
    lone = point(100, 50, clients=1)
    assert request_limit(lone, [lone], 50.0, 256) == 2


def test_without_a_p99_the_limit_is_as_it_was_and_at_least_twice_the_clients():
    assert request_limit(point(100, 50, clients=16), [], None, 256) == 256
    assert request_limit(point(100, 50, clients=512), [], None, 256) == 1024


def test_many_clients_need_places_in_every_queue():
    config = tuned(BASE, point(100, 50, clients=1024), [], None)
    assert config.settings.max_queued_images == 2048
    assert gateway_of(config)["max_ongoing_requests"] == 4096


def test_replicas_by_number_replace_autoscaling(tmp_path):
    scaling = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}}
    base = BASE.with_deployment(gateway_of(BASE) | scaling | {"max_replicas_per_node": 1})
    chosen = point(100, 50, replicas=2, cores=1)
    path = tmp_path / "x.yaml"
    path.write_text(as_yaml(tuned(base, chosen, [], None), chosen, MACHINE, None))
    assert gateway_of(ServeConfig.read(path))["num_replicas"] == 2


def test_a_configuration_without_deployments_gets_a_gateway():
    base = ServeConfig.of({"applications": [{"import_path": "app.main:build"}]})
    config = tuned(base, point(100, 50), [], None)
    assert gateway_of(config)["max_ongoing_requests"] == 256


@pytest.mark.parametrize(("before", "after"), [({}, 4), (None, 4), (1, 4), (0.5, 0.5), (0, 0)])
def test_a_share_for_placement_stays_and_whole_cpus_are_the_measured_cores(before, after):
    options = before if before == {} else {"num_cpus": before}
    base = BASE.with_deployment(gateway_of(BASE) | {"ray_actor_options": options})
    config = tuned(base, point(100, 50, replicas=1, cores=4), [], None)
    assert gateway_of(config)["ray_actor_options"]["num_cpus"] == after


def test_the_header_tells_where_the_numbers_come_from():
    chosen = point(100, 50, clients=16)
    machine = {**MACHINE, "command": "tandem tune --write 'a\nb: c'"}
    text = as_yaml(tuned(BASE, chosen, [], 80.0), chosen, machine, 80.0)
    header = [line for line in text.splitlines() if line.startswith("#")]
    for fact in ("2026-01-01", "a CPU, 8 cores", "100.0 images/s", "p99 50 ms", "16 clients"):
        assert any(fact in line for line in header), fact
    assert any("16 for each Gateway" in line for line in header)
    assert "HTTP and Ray are not in it" in " ".join(header)
    assert max(map(len, header)) <= 120
    assert yaml.safe_load(text) == tuned(BASE, chosen, [], 80.0).as_dict()


def test_stages_elsewhere_are_not_what_is_measured():
    check_place(Settings(), Path("c.yaml"))
    with pytest.raises(ConfigError, match=r"c\.yaml: decoder, members in deployments"):
        check_place(Settings(decoder="deployment", members="deployment"), Path("c.yaml"))
