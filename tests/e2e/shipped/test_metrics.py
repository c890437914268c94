"""Debian's Prometheus scrapes the running service with the shipped configuration, and is asked."""

import shutil
import subprocess
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from app.telemetry.metric_table import METRICS, REQUESTS
from models.model_set import load_model_set
from tests.support.exposed_metrics import exposed
from tests.support.prometheus_programs import PROMETHEUS
from tests.support.services.live_service import ROOT, Service
from tests.support.services.processes import EVENTUALLY_S, descendants, listening, wait_until

pytestmark = pytest.mark.prometheus
CONFIGS = ROOT / "configs" / "prometheus"
MEMBERS = {member.name for member in load_model_set("imagenette").manifest.members}
Sample = tuple[dict[str, str], float]


@dataclass
class Prometheus:
    """A running one, asked over its HTTP API."""

    url: str

    def get(self, path: str, **parameters: str) -> dict:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10)
        return answer.raise_for_status().json()["data"]

    def ask(self, query: str) -> list[Sample]:
        result = self.get("query", query=query)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False


def metrics_address(service: Service) -> str:
    return urlsplit(service.metrics_url).netloc


def shipped_config(folder, target):
    """Return the project's own configuration, but for the target and the pace."""
    config = yaml.safe_load((CONFIGS / "prometheus.yaml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    shutil.copy(CONFIGS / "alerts.yaml", folder)
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    return path


@pytest.fixture(scope="module")
def prometheus(service, free_port, tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    command = [
        str(PROMETHEUS),
        f"--config.file={shipped_config(folder, metrics_address(service))}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log.txt").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    running = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(running.is_up, EVENTUALLY_S, "prometheus is not up")
        yield running
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def used(service, photo, prometheus) -> Prometheus:
    """Prometheus after good and bad requests, as soon as it has seen them."""
    with httpx.Client(base_url=service.url, timeout=60) as client:
        for body, status in ((photo, 200), (photo, 200), (b"no image", 400)):
            assert client.post("/v1/classify", content=body).status_code == status
        files = [("files", (str(i), photo)) for i in range(4)]
        assert client.post("/v1/classify", files=files).status_code == 200
        assert client.get("/v1/nothing").status_code == 404
    seen = f'{exposed(REQUESTS)[0]}{{status="404"}}'
    wait_until(lambda: bool(prometheus.ask(seen)), EVENTUALLY_S, "the requests are not seen")
    return prometheus


@pytest.mark.parametrize(
    "metric", [m for m in METRICS if not m.when], ids=lambda metric: metric.name
)
def test_a_metric_has_a_value(used, metric):
    for name in exposed(metric):
        samples = used.ask(name)
        assert samples, name
        for labels, _ in samples:
            assert (labels["application"], labels["deployment"]) == ("tandem", "Gateway")
            assert labels.keys() >= {*metric.tags, "replica"}
        if "member" in metric.tags:
            assert {labels["member"] for labels, _ in samples} >= MEMBERS


def test_good_and_bad_requests_are_told_apart(used):
    samples = used.ask(f'{exposed(REQUESTS)[0]}{{route="/v1/classify"}}')
    by_status = {labels["status"]: value for labels, value in samples}
    assert by_status["200"] >= 3
    assert by_status["400"] >= 1


def test_an_image_takes_as_long_as_its_stages_say(used):
    (infer,) = used.ask('sum(ray_tandem_stage_ms_count{stage="infer"})')
    (images,) = used.ask("sum(ray_tandem_answers_total)")
    assert infer[1] == images[1] * len(MEMBERS)
    (entropy,) = used.ask("sum(ray_tandem_answer_entropy_total) / sum(ray_tandem_answers_total)")
    assert 0 < entropy[1] < 1


def test_the_rules_are_evaluated_and_none_fires(used):
    rules = [rule for group in used.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert [r["name"] for r in rules if r["type"] == "alerting" and r["state"] == "firing"] == []


def test_the_address_is_the_services_own(service):
    port = int(metrics_address(service).rpartition(":")[2])
    assert port in listening(descendants(service.process.pid))
