"""configs/kubernetes, rendered by kustomize: valid, closed, and saying what other files say."""

import importlib.util
import json
import shlex
import subprocess
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
from app.launch.log_and_metrics import LIVE_PATH
from tests.support.cases import cases
from tests.support.client_environments import KSERVE
from tests.support.command_line import options_of
from tests.support.custom_resources import KINDS, kubernetes_parts
from tests.support.manifests import FOLDERS, KUBERNETES, of_kind, pods, rendered

kubernetes_validate = pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.kubernetes
ROOT = KUBERNETES.parents[1]
OLDEST, NEWEST = "1.27", "1.37"  # as docs/how-to/kubernetes.md says
SERVED, OF_KSERVE = "tandem", ("ServingRuntime", "InferenceService")
Document = dict[str, Any]


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", KUBERNETES / "render.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)
    return module


def pods_of(folder: str) -> list[Document]:
    return [pod for document in rendered(folder) for pod in pods(document)]


def all_pods() -> list[Document]:
    return [pod for folder in FOLDERS for pod in pods_of(folder)]


def container_of(pod: Document) -> Document:
    (container,) = pod["spec"]["containers"]
    return container


def groups_of(cluster: Document) -> list[Document]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def variables_of(group: Document) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container_of(group["template"])["env"]}


def check(document: Document, version: str = NEWEST) -> None:
    """Raise what the API server would refuse it for, unknown fields too."""
    if document["kind"] in KINDS:
        KINDS[document["kind"]].model_validate(document)
        for part in kubernetes_parts(document):
            kubernetes_validate.validate(part, version, strict=True)
    else:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_resource_is_valid(folder: str, version: str) -> None:
    documents = [d for d in rendered(folder) if d["kind"] not in OF_KSERVE]
    for document in documents:
        check(document, version)
    assert documents or folder == "kserve"


@cases(
    "folder, kind, path",
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
    closed = {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for spec in (pod["spec"] for pod in all_pods()):
        for container in spec["containers"]:
            security = {**spec.get("securityContext", {}), **container["securityContext"]}
            assert security | closed == security
            assert container["resources"]["limits"]["memory"]
            for name, probe in container.items():
                if name.endswith("Probe"):
                    assert probe["timeoutSeconds"] >= 2, (container["name"], name)


def test_what_serves_can_write_to_tmp_and_has_shared_memory() -> None:
    serving = [p for p in all_pods() if p["metadata"]["labels"]["app.kubernetes.io/name"] == SERVED]
    assert len(serving) == 4  # base, head, worker, KServe's
    for pod in serving:
        volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
        container = container_of(pod)
        mounted = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
        assert mounted["/tmp"]["emptyDir"]["sizeLimit"]
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert "metrics" in {port["name"] for port in container["ports"]}


@pytest.mark.parametrize("folder", ["base", "kserve"])
def test_the_command_takes_the_pods_arguments(folder: str) -> None:
    container = container_of(next(p for d in rendered(folder) for p in pods(d)))
    command, *options = container["args"]
    values = dict(option.split("=", 1) for option in options)
    assert values.keys() <= options_of(command)
    http_port = values.get("--port", "8000")
    ports = {str(port["containerPort"]) for port in container["ports"]}
    assert {http_port, values["--metrics-port"]} <= ports
    assert values["--metrics-port"] == str(METRICS_PORT)
    for name, probe in ((name, container[name]) for name in container if name.endswith("Probe")):
        port = ("metrics", METRICS_PORT) if name == "livenessProbe" else ("http", int(http_port))
        assert probe["httpGet"]["port"] in port, "a full house must not fail the liveness"
        assert (probe["httpGet"]["path"] == LIVE_PATH) == (name == "livenessProbe")


@pytest.mark.parametrize("folder", ["base", "kuberay", "rayjob"])
def test_selectors_select_the_pods(folder: str) -> None:
    labels = [p["metadata"]["labels"] for d in rendered(folder) for p in pods(d)]
    budgets, policies = of_kind(folder, "PodDisruptionBudget"), of_kind(folder, "NetworkPolicy")
    closed = [d["spec"]["podSelector"]["matchLabels"] for d in policies]
    selectors = [d["spec"]["selector"] for d in of_kind(folder, "Service")]
    selectors += [d["spec"]["selector"]["matchLabels"] for d in budgets]
    for selector in selectors + closed:
        assert any(selector.items() <= pod.items() for pod in labels), selector
    assert all(any(one.items() <= pod.items() for one in closed) for pod in labels), "no policy"


def test_prometheus_may_reach_what_the_monitor_asks() -> None:
    """The dashboard comes along."""
    (monitor,) = of_kind("monitoring", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    assert len([p for p in all_pods() if selected <= p["metadata"]["labels"].items()]) == 4
    ours = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yaml").read_text("utf-8"))
    (relabeling,) = ours["scrape_configs"][0]["metric_relabel_configs"]
    (theirs,) = endpoint["metricRelabelings"]
    assert theirs == {"sourceLabels": relabeling.pop("source_labels"), **relabeling}
    (dashboard,) = of_kind("monitoring", "ConfigMap")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    written = (ROOT / "configs" / "grafana" / "tandem.json").read_text("utf-8")
    assert dashboard["data"]["tandem.json"] == written


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


def test_the_ray_service_serves_whole_graphs_with_keys_and_grpc(render, tmp_path):
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
    head, worker = (group["template"] for group in groups_of(cluster))
    selector = ours["spec"]["selector"].items()
    assert selector <= worker["metadata"]["labels"].items()
    assert not selector <= head["metadata"]["labels"].items()
    ports = {p["name"]: p["containerPort"] for p in container_of(worker)["ports"]}
    reached = {port["port"]: ports[port["targetPort"]] for port in ours["spec"]["ports"]}
    assert reached == {80: 8000, 9000: 9000}


def test_every_ray_pod_has_the_nodes_environment(cluster: Document, render: ModuleType) -> None:
    wanted = render.environment()
    assert wanted["RAY_SERVE_HAPROXY_MAXCONN"] == str(MAX_CONNECTIONS)
    for group in groups_of(cluster):
        assert variables_of(group) == wanted
        ports = {port["containerPort"] for port in container_of(group["template"])["ports"]}
        assert ports >= {8000, 8080}
    dockerfile = (ROOT / "configs" / "docker" / "Dockerfile").read_text("utf-8")
    assert f"tandem environment --folder {render.HAPROXY.parent} " in dockerfile


def test_the_ray_pods_log_where_kubectl_looks(cluster: Document) -> None:
    """Serve's lines go to stderr, and what Ray starts keeps the pod's."""
    from ray.scripts.scripts import start

    options: dict[str, Any] = {o.removeprefix("--"): p for p in start.params for o in p.opts}
    assert options["no-redirect-output"].is_flag
    for group in groups_of(cluster):
        parameters = group["rayStartParams"]
        assert parameters.keys() <= options.keys()
        assert parameters["no-redirect-output"] == "true"
        assert variables_of(group)["RAY_SERVE_LOG_TO_STDERR"] == "1"


def test_a_worker_holds_what_a_node_may_and_drains_in_its_time(cluster: Document) -> None:
    (workers,) = cluster["workerGroupSpecs"]
    container, spec = container_of(workers["template"]), workers["template"]["spec"]
    (gateway,) = ServeConfig.read(ROOT / "configs" / "cluster-whole.yaml").deployments
    per_node, scaling = gateway["max_replicas_per_node"], gateway["autoscaling_config"]
    requests, limits = (container["resources"][name]["cpu"] for name in ("requests", "limits"))
    assert requests == limits
    assert int(limits) >= per_node * gateway["ray_actor_options"]["num_cpus"]
    assert scaling["min_replicas"] > per_node  # a node's death takes none
    assert workers["minReplicas"] == workers["replicas"] >= 2
    assert workers["maxReplicas"] >= scaling["max_replicas"] / per_node
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


@pytest.mark.parametrize("folder", ["base", "kuberay", "rayjob"])
def test_who_comes_in_and_where_pods_go_is_said(folder: str) -> None:
    """A label alone, which who may make pods can give them, lets nobody in."""
    policies = [document["spec"] for document in of_kind(folder, "NetworkPolicy")]
    assert all("Egress" in spec["policyTypes"] for spec in policies)
    assert all(rule for spec in policies for rule in spec.get("egress", ()))
    sources = [s for spec in policies for r in spec.get("ingress", ()) for s in r.get("from", ())]
    namespaces = [s["namespaceSelector"] for s in sources if "namespaceSelector" in s]
    named = {space["matchLabels"]["kubernetes.io/metadata.name"] for space in namespaces}
    assert named <= {"monitoring", "kuberay-system"}
    operators = [str(s) for s in sources if "kuberay-operator" in str(s)]
    assert len(operators) == (folder != "base")
    assert all("'kubernetes.io/metadata.name': 'kuberay-system'" in s for s in operators)


def test_no_container_that_runs_code_of_ray_has_a_token_of_kubernetes(cluster: Document) -> None:
    """The autoscaler's sidecar, which Ray's tasks cannot enter, has it where it looks for it."""
    from ray.autoscaler._private.kuberay import node_provider

    of_kserve = of_kind("kserve", "InferenceService")[0]["spec"]["predictor"]
    for spec in (*(p["spec"] for f in FOLDERS if f != "kserve" for p in pods_of(f)), of_kserve):
        assert spec["automountServiceAccountToken"] is False
    head, worker = (group["template"] for group in groups_of(cluster))
    (mount,) = cluster["autoscalerOptions"]["volumeMounts"]
    volumes = {volume["name"]: volume for volume in head["spec"]["volumes"]}
    sources = volumes[mount["name"]]["projected"]["sources"]
    paths = [s[k].get("path") or s[k]["items"][0]["path"] for s in sources for k in s]
    needed = {node_provider.IN_CLUSTER_TOKEN_PATH, node_provider.IN_CLUSTER_CA_CERT_PATH}
    assert needed <= {f"{mount['mountPath']}/{path}" for path in paths}
    assert all("projected" not in volume for volume in worker["spec"]["volumes"])
    mounted = {m["name"] for pod in (head, worker) for m in container_of(pod)["volumeMounts"]}
    assert mount["name"] not in mounted


def test_the_ray_job_classifies_on_its_workers(cluster: Document) -> None:
    (job,) = of_kind("rayjob", "RayJob")
    command, action, *options = shlex.split(job["spec"]["entrypoint"])
    assert (command, action) == ("tandem", "classify-offline")
    named = {word.partition("=")[0] for word in options if word.startswith("--")}
    assert {"--address", "--out"} <= named <= options_of(action)
    of_job = job["spec"]["rayClusterSpec"]
    for key in ("rayVersion", "authOptions"):
        assert of_job[key] == cluster[key]
    assert of_job["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    submitter, *nodes = pods(job)
    assert submitter["spec"]["restartPolicy"] == "Never"  # a job's pod must say
    for container in map(container_of, nodes):
        assert {"/tmp", "/dev/shm"} <= {m["mountPath"] for m in container["volumeMounts"]}
        assert container["envFrom"] == [{"secretRef": {"name": "tandem-store", "optional": True}}]
    (workers,) = of_job["workerGroupSpecs"]
    cpus = container_of(workers["template"])["resources"]["limits"]["cpu"]
    assert int(cpus) % CORES == 0  # no core is left over


@pytest.mark.parametrize("folder", ["base", "kuberay"])
def test_keys_come_from_the_secret(folder: str) -> None:
    (serving,) = [d for d in rendered(folder) if d["kind"] in ("Deployment", "RayService")]
    for pod in pods(serving):
        secrets = [v["secret"] for v in pod["spec"]["volumes"] if "secret" in v]
        assert secrets == [{"secretName": "tandem-keys", "defaultMode": 0o440}]
        mounts = container_of(pod)["volumeMounts"]
        assert [m["mountPath"] for m in mounts if m["name"] == "keys"] == ["/etc/tandem"]


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
    model, spec = service["spec"]["predictor"]["model"], runtime["spec"]
    container = container_of(runtime)
    assert container["name"] == "kserve-container"
    assert "--model-set=/mnt/models" in container["args"]
    # KServe's Service has the ports that the container declares.
    named = {argument.partition("port=")[2] for argument in container["args"]} - {""}
    assert {int(port) for port in named} <= {port["containerPort"] for port in container["ports"]}
    assert "9000" in named
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {f["name"] for f in spec["supportedModelFormats"]}
    assert model["protocolVersion"] in spec["protocolVersions"]
    folder = ROOT / "models" / service["metadata"]["name"]
    assert (folder / "manifest.yaml").is_file()
