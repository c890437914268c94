"""configs/kubernetes, rendered by kustomize: valid, closed, and saying what other files say."""

import importlib.util
import json
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from app.cli.cluster_rows import CORES
from app.launch.checks import METRICS_PORT
from app.launch.config import ServeConfig
from app.launch.haproxy import MAX_CONNECTIONS
from tests.support.command_line import options_of
from tests.support.custom_resources import KINDS, kubernetes_parts
from tests.support.kserve_environment import KSERVE
from tests.support.manifests import FOLDERS, KUBERNETES, of_kind, pods, rendered

kubernetes_validate = pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.kubernetes
ROOT = KUBERNETES.parents[1]
KUBERNETES_VERSION = "1.37"
SERVED, OF_KSERVE = "tandem", ("ServingRuntime", "InferenceService")
Document = dict[str, Any]


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", KUBERNETES / "render.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def all_documents() -> Iterator[Document]:
    for folder in FOLDERS:
        yield from rendered(folder)


def all_pods() -> Iterator[Document]:
    for document in all_documents():
        yield from pods(document)


def check(document: Document) -> None:
    """Raise what the API server would refuse it for, unknown fields too."""
    if document["kind"] in KINDS:
        KINDS[document["kind"]].model_validate(document)
        for part in kubernetes_parts(document):
            kubernetes_validate.validate(part, KUBERNETES_VERSION, strict=True)
    else:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_resource_is_valid(folder: str) -> None:
    documents = [d for d in rendered(folder) if d["kind"] not in OF_KSERVE]
    for document in documents:
        check(document)
    assert documents or folder == "kserve"


@pytest.mark.parametrize(
    ("folder", "kind", "path"),
    [
        ("base", "Deployment", "spec.template.spec.containers.0.readinessProbe.timeout"),
        ("base", "NetworkPolicy", "spec.ingres"),
        ("kuberay", "RayService", "spec.excludeHeadPodFromService"),
        ("kuberay", "RayService", "spec.rayClusterConfig.authOption"),
        ("kuberay", "RayService", "spec.rayClusterConfig.workerGroupSpecs.0.template.spec.volume"),
        ("rayjob", "RayJob", "spec.ttlSeconds"),
        ("rayjob", "RayJob", "spec.rayClusterSpec.headGroupSpec.rayParams"),
        ("rayjob", "RayJob", "spec.submitterPodTemplate.spec.restart"),
        ("monitoring", "PodMonitor", "spec.podMetricsEndpoints.0.intervall"),
        ("monitoring", "PrometheusRule", "spec.groups.0.rules.0.expression"),
    ],
)
def test_the_check_is_strict(folder: str, kind: str, path: str) -> None:
    document = json.loads(json.dumps(of_kind(folder, kind)[0]))
    place: Any = document
    *way, name = path.split(".")
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[name] = "1s"
    with pytest.raises((kubernetes_validate.ValidationError, ValidationError)):
        check(document)


@pytest.mark.kserve
@pytest.mark.parametrize("misspelt", [None, "storageURI"])
def test_what_kserve_takes_is_valid(tmp_path: Path, misspelt: str | None) -> None:
    documents = json.loads(json.dumps(rendered("kserve")))
    if misspelt:
        (service,) = (d for d in documents if d["kind"] == "InferenceService")
        service["spec"]["predictor"]["model"][misspelt] = "pvc://x"
    file = tmp_path / "resources.json"
    file.write_text(json.dumps(documents))
    command = [KSERVE, ROOT / "tests" / "support" / "kserve_kinds.py", file]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == (1 if misspelt else 0), said.stdout + said.stderr
    assert (misspelt or "") in said.stdout


def test_pods_are_closed() -> None:
    """As the namespace's standard "restricted" asks, and with a root folder that is read-only."""
    for pod in all_pods():
        spec = pod["spec"]
        for container in spec["containers"]:
            security = {**spec.get("securityContext", {}), **container["securityContext"]}
            assert security["runAsNonRoot"] is True
            assert security["runAsUser"] == 10001
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            for name, probe in container.items():
                if name.endswith("Probe"):
                    assert probe["timeoutSeconds"] >= 2, (container["name"], name)


def test_what_serves_can_write_to_tmp_and_has_shared_memory() -> None:
    serving = [p for p in all_pods() if p["metadata"]["labels"]["app.kubernetes.io/name"] == SERVED]
    assert len(serving) == 4  # base, head, worker, KServe's
    for pod in serving:
        volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
        (container,) = pod["spec"]["containers"]
        mounted = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
        assert mounted["/tmp"]["emptyDir"]["sizeLimit"]
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert "metrics" in {port["name"] for port in container["ports"]}


@pytest.mark.parametrize("folder", ["base", "kserve"])
def test_the_command_takes_the_pods_arguments(folder: str) -> None:
    (container,) = next(p for d in rendered(folder) for p in pods(d))["spec"]["containers"]
    command, *options = container["args"]
    given = dict(option.split("=", 1) for option in options)
    assert given.keys() <= options_of(command)
    ports = {str(port["containerPort"]) for port in container["ports"]}
    assert {given.get("--port", "8000"), given["--metrics-port"]} <= ports
    assert given["--metrics-port"] == str(METRICS_PORT)
    for probe in (container[name] for name in container if name.endswith("Probe")):
        asked = probe["httpGet"]["port"]
        assert asked in ("http", int(given.get("--port", "8000")))


@pytest.mark.parametrize("folder", ["base", "kuberay", "rayjob"])
def test_selectors_select_the_pods(folder: str) -> None:
    labels = [p["metadata"]["labels"] for d in rendered(folder) for p in pods(d)]
    selectors = [d["spec"]["selector"] for d in of_kind(folder, "Service")]
    selectors += [
        d["spec"]["selector"]["matchLabels"] for d in of_kind(folder, "PodDisruptionBudget")
    ]
    policies = of_kind(folder, "NetworkPolicy")
    selectors += [d["spec"]["podSelector"]["matchLabels"] for d in policies]
    for selector in selectors:
        assert any(selector.items() <= one.items() for one in labels), selector
    closed = [d["spec"]["podSelector"]["matchLabels"] for d in policies]
    assert all(any(one.items() <= pod.items() for one in closed) for pod in labels), "no policy"


def test_prometheus_may_reach_what_the_monitor_asks() -> None:
    (monitor,) = of_kind("monitoring", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    serving = [p for p in all_pods() if selected <= p["metadata"]["labels"].items()]
    assert len(serving) == 4
    ours = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yaml").read_text("utf-8"))
    (relabeling,) = ours["scrape_configs"][0]["metric_relabel_configs"]
    (theirs,) = endpoint["metricRelabelings"]
    assert theirs == {
        "sourceLabels": relabeling["source_labels"],
        "regex": relabeling["regex"],
        "action": relabeling["action"],
    }


def test_the_dashboard_comes_along() -> None:
    (dashboard,) = of_kind("monitoring", "ConfigMap")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboard["data"]["tandem.json"] == (
        ROOT / "configs" / "grafana" / "tandem.json"
    ).read_text("utf-8")


def test_the_written_files_are_what_render_writes(render: ModuleType) -> None:
    """Of the Ray in constraints.txt; the tests may run with another one."""
    constraints = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    (locked,) = (line.removeprefix("ray==") for line in constraints if line.startswith("ray=="))
    of_installed = f'rayVersion: "{version("ray")}"'
    for path, written in render.WRITTEN.items():
        expected = written().replace(of_installed, f'rayVersion: "{locked}"')
        assert path.read_text("utf-8") == expected, "run: python configs/kubernetes/render.py"


@pytest.fixture(scope="module")
def cluster() -> Document:
    return of_kind("kuberay", "RayService")[0]["spec"]["rayClusterConfig"]


def test_the_ray_service_serves_whole_graphs_with_keys_and_grpc(
    render: ModuleType, tmp_path: Path
) -> None:
    (service,) = of_kind("kuberay", "RayService")
    (tmp_path / "served.yaml").write_text(service["spec"]["serveConfigV2"], "utf-8")
    served = ServeConfig.read(tmp_path / "served.yaml")
    assert served.as_dict() == render.serve_config().as_dict()
    assert served.grpc_port == 9000
    (gateway,) = served.deployments
    assert gateway["name"] == "Gateway"
    assert served.settings.api_keys_file == Path("/etc/tandem/keys")
    assert service["spec"]["excludeHeadPodFromServeSvc"] is True


def test_callers_reach_both_ports_of_the_workers(cluster: Document) -> None:
    """KubeRay's own Service has the port named serve alone."""
    (ours,) = (d for d in of_kind("kuberay", "Service") if d["metadata"]["name"] == "tandem")
    assert "serveService" not in of_kind("kuberay", "RayService")[0]["spec"]
    (group,) = cluster["workerGroupSpecs"]
    worker, head = group["template"], cluster["headGroupSpec"]["template"]
    selector = ours["spec"]["selector"].items()
    assert selector <= worker["metadata"]["labels"].items()
    assert not selector <= head["metadata"]["labels"].items()
    ports = {p["name"]: p["containerPort"] for p in worker["spec"]["containers"][0]["ports"]}
    reached = {port["port"]: ports[port["targetPort"]] for port in ours["spec"]["ports"]}
    assert reached == {80: 8000, 9000: 9000}


def test_every_ray_pod_has_the_nodes_environment(cluster: Document, render: ModuleType) -> None:
    wanted = render.environment()
    assert wanted["RAY_SERVE_HAPROXY_MAXCONN"] == str(MAX_CONNECTIONS)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {one["name"]: one["value"] for one in container["env"]} == wanted
        assert {port["containerPort"] for port in container["ports"]} >= {8000, 8080}


def test_the_ray_pods_log_where_kubectl_looks(cluster: Document) -> None:
    """Serve's lines go to stderr, and what Ray starts keeps the pod's."""
    from ray.scripts.scripts import start

    options: dict[str, Any] = {o.removeprefix("--"): p for p in start.params for o in p.opts}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        parameters = group["rayStartParams"]
        assert parameters.keys() <= options.keys()
        assert options["no-redirect-output"].is_flag
        assert parameters["no-redirect-output"] == "true"
        (container,) = group["template"]["spec"]["containers"]
        variables = {one["name"]: one["value"] for one in container["env"]}
        assert variables["RAY_SERVE_LOG_TO_STDERR"] == "1"


def test_the_image_has_the_command_that_the_environment_names(render: ModuleType) -> None:
    dockerfile = (ROOT / "configs" / "docker" / "Dockerfile").read_text("utf-8")
    assert f"tandem environment --folder {render.HAPROXY.parent} " in dockerfile


def test_a_worker_holds_what_a_node_may_and_drains_in_its_time(cluster: Document) -> None:
    (workers,) = cluster["workerGroupSpecs"]
    spec = workers["template"]["spec"]
    (container,) = spec["containers"]
    (gateway,) = ServeConfig.read(ROOT / "configs" / "cluster-whole.yaml").deployments
    cpus = gateway["max_replicas_per_node"] * gateway["ray_actor_options"]["num_cpus"]
    assert container["resources"]["requests"]["cpu"] == container["resources"]["limits"]["cpu"]
    assert int(container["resources"]["limits"]["cpu"]) >= cpus
    scaling = gateway["autoscaling_config"]
    assert scaling["min_replicas"] > gateway["max_replicas_per_node"]  # a node's death takes none
    assert workers["minReplicas"] == workers["replicas"] >= 2
    assert workers["maxReplicas"] >= scaling["max_replicas"] / gateway["max_replicas_per_node"]
    command = " ".join(container["lifecycle"]["preStop"]["exec"]["command"])
    assert "ray drain-node" in command
    assert "--deadline-remaining-seconds 50; sleep 50" in command
    assert spec["terminationGracePeriodSeconds"] == 60
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["matchLabelKeys"] == ["ray.io/cluster"]


def test_rays_doors_are_closed_and_its_head_keeps_its_state(cluster: Document) -> None:
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    address, _, port = cluster["gcsFaultToleranceOptions"]["redisAddress"].partition(":")
    (redis,) = (d for d in of_kind("kuberay", "Service") if "redis" in d["metadata"]["name"])
    assert (redis["metadata"]["name"], redis["spec"]["ports"][0]["port"]) == (address, int(port))
    by_name = {d["metadata"]["name"]: d["spec"] for d in of_kind("kuberay", "NetworkPolicy")}
    everybody = [rule for rule in by_name["tandem-ray"]["ingress"] if "from" not in rule]
    assert [{p["port"] for p in rule["ports"]} for rule in everybody] == [{8000, 9000}]
    assert by_name["tandem-redis"]["policyTypes"] == ["Ingress", "Egress"]


def test_the_ray_job_classifies_on_its_workers(cluster: Document) -> None:
    (job,) = of_kind("rayjob", "RayJob")
    command, *words = shlex.split(job["spec"]["entrypoint"])
    action, *options = words
    assert (command, action) == ("tandem", "classify")
    named = {word.partition("=")[0] for word in options if word.startswith("--")}
    assert {"--offline", "--address", "--out"} <= named <= options_of(action)
    of_job = job["spec"]["rayClusterSpec"]
    assert (of_job["rayVersion"], of_job["authOptions"]) == (
        cluster["rayVersion"],
        cluster["authOptions"],
    )
    assert of_job["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    submitter, *nodes = pods(job)
    assert submitter["spec"]["restartPolicy"] == "Never"  # a job's pod must say
    for pod in nodes:
        (container,) = pod["spec"]["containers"]
        assert {"/tmp", "/dev/shm"} <= {m["mountPath"] for m in container["volumeMounts"]}
        assert container["envFrom"] == [{"secretRef": {"name": "tandem-store", "optional": True}}]
    (workers,) = of_job["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["cpu"]) % CORES == 0  # no core is left over


@pytest.mark.parametrize("folder", ["base", "kuberay"])
def test_keys_come_from_the_secret(folder: str) -> None:
    (serving,) = [d for d in rendered(folder) if d["kind"] in ("Deployment", "RayService")]
    for pod in pods(serving):
        secrets = [v["secret"] for v in pod["spec"]["volumes"] if "secret" in v]
        assert secrets == [{"secretName": "tandem-keys", "defaultMode": 0o440}]
        (container,) = pod["spec"]["containers"]
        paths = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "keys"]
        assert paths == ["/etc/tandem"]


def test_the_services_pods_are_scaled_and_spread() -> None:
    (scaler,) = of_kind("base", "HorizontalPodAutoscaler")
    (deployment,) = of_kind("base", "Deployment")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert scaler["spec"]["minReplicas"] >= 2
    assert "replicas" not in deployment["spec"]  # an apply would undo the scaler's
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_kserve_finds_the_format_and_the_model() -> None:
    (runtime,) = of_kind("kserve", "ServingRuntime")
    (service,) = of_kind("kserve", "InferenceService")
    model = service["spec"]["predictor"]["model"]
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"
    assert "--model-set=/mnt/models" in container["args"]
    # KServe's Service has the ports that the container declares.
    named = {argument.partition("port=")[2] for argument in container["args"]} - {""}
    assert {int(port) for port in named} <= {port["containerPort"] for port in container["ports"]}
    assert "9000" in named
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {
        f["name"] for f in runtime["spec"]["supportedModelFormats"]
    }
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    folder = ROOT / "models" / service["metadata"]["name"]
    assert (folder / "manifest.yaml").is_file()
