"""Custom resources as their operators define them, strictly: an unknown field is an error.

Of what the manifests use, after the references of KubeRay 1.7 (ray.io/v1) and of the Prometheus
operator 0.93 (monitoring.coreos.com/v1). What these have of Kubernetes' own (pods, a service,
sources of variables) is checked by its schemas. KServe's are checked by its Python SDK.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from tests.support.manifests import pods

Spec = dict[str, Any]
Duration = Annotated[str, StringConstraints(pattern=r"^(\d+(ms|s|m|h|d|w|y))+$")]
Labels = dict[str, str]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(_Strict):
    name: str
    labels: Labels = {}
    annotations: Labels = {}


class Credential(_Strict):
    value: str | None = None
    valueFrom: Spec | None = None


class GcsFaultTolerance(_Strict):
    redisAddress: str | None = None
    redisUsername: Credential | None = None
    redisPassword: Credential | None = None
    externalStorageNamespace: str | None = None
    backend: Literal["redis", "rocksdb"] | None = None
    storage: Spec | None = None


class AutoscalerOptions(_Strict):
    resources: Spec | None = None
    image: str | None = None
    imagePullPolicy: str | None = None
    securityContext: Spec | None = None
    idleTimeoutSeconds: int | None = None
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] | None = None
    version: Literal["v1", "v2"] | None = None
    env: list[Spec] = []
    envFrom: list[Spec] = []
    volumeMounts: list[Spec] = []


class HeadGroup(_Strict):
    template: Spec
    headService: Spec | None = None
    enableIngress: bool | None = None
    rayStartParams: Labels
    serviceType: str | None = None
    resources: Labels = {}
    labels: Labels = {}


class WorkerGroup(_Strict):
    groupName: str
    replicas: int
    minReplicas: int
    maxReplicas: int
    idleTimeoutSeconds: int | None = None
    rayStartParams: Labels
    template: Spec
    numOfHosts: int = 1
    suspend: bool | None = None
    resources: Labels = {}
    labels: Labels = {}


class AuthOptions(_Strict):
    mode: Literal["disabled", "token"]
    secretName: str | None = None
    enableK8sTokenAuth: bool | None = None


class RayCluster(_Strict):
    rayVersion: str
    authOptions: AuthOptions | None = None
    gcsFaultToleranceOptions: GcsFaultTolerance | None = None
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: AutoscalerOptions | None = None
    headServiceAnnotations: Labels = {}
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class UpgradeStrategy(_Strict):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]
    clusterUpgradeOptions: Spec | None = None


class RayServiceSpec(_Strict):
    serveConfigV2: str
    rayClusterConfig: RayCluster
    upgradeStrategy: UpgradeStrategy | None = None
    serveService: Spec | None = None
    excludeHeadPodFromServeSvc: bool = False
    rayClusterDeletionDelaySeconds: int | None = None
    suspend: bool | None = None


class RayService(_Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


class RayJobSpec(_Strict):
    activeDeadlineSeconds: int | None = None
    backoffLimit: int = 0
    rayClusterSpec: RayCluster
    submitterPodTemplate: Spec
    metadata: Labels = {}
    submitterConfig: Spec | None = None
    entrypoint: str
    runtimeEnvYAML: str | None = None
    jobId: str | None = None
    submissionMode: Literal["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"] = (
        "K8sJobMode"
    )
    entrypointNumCpus: float | None = None
    ttlSecondsAfterFinished: int = 0
    shutdownAfterJobFinishes: bool = False
    suspend: bool = False


class RayJob(_Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


class Relabeling(_Strict):
    sourceLabels: list[str] = []
    regex: str | None = None
    action: Literal["keep", "drop", "replace", "labeldrop", "labelkeep"] = "replace"
    targetLabel: str | None = None
    replacement: str | None = None


class MetricsEndpoint(_Strict):
    port: str
    path: str = "/metrics"
    interval: Duration | None = None
    scrapeTimeout: Duration | None = None
    metricRelabelings: list[Relabeling] = []
    relabelings: list[Relabeling] = []


class LabelSelector(_Strict):
    matchLabels: Labels = {}
    matchExpressions: list[Spec] = []


class PodMonitorSpec(_Strict):
    selector: LabelSelector
    podMetricsEndpoints: list[MetricsEndpoint]
    namespaceSelector: Spec | None = None


class PodMonitor(_Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: PodMonitorSpec


class Rule(_Strict):
    record: str | None = None
    alert: str | None = None
    expr: str
    for_: Duration | None = Field(None, alias="for")
    keep_firing_for: Duration | None = None
    labels: Labels = {}
    annotations: Labels = {}


class RuleGroup(_Strict):
    name: Annotated[str, StringConstraints(min_length=1)]
    interval: Duration | None = None
    rules: list[Rule]


def _names_differ(groups: list[RuleGroup]) -> list[RuleGroup]:
    if len({group.name for group in groups}) < len(groups):
        raise ValueError("two groups of one name")
    return groups


class PrometheusRuleSpec(_Strict):
    groups: Annotated[list[RuleGroup], AfterValidator(_names_differ)]


class PrometheusRule(_Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: PrometheusRuleSpec


KINDS = {kind.__name__: kind for kind in (RayService, RayJob, PodMonitor, PrometheusRule)}


def kubernetes_parts(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return what a custom resource has of Kubernetes' own, as resources of that kind."""
    for template in pods(document) if document["kind"] in ("RayService", "RayJob") else ():
        metadata = {"name": "pod", **template.get("metadata", {})}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    if document["kind"] != "RayService":
        return
    spec = document["spec"]
    if service := spec.get("serveService"):
        yield {"apiVersion": "v1", "kind": "Service", **service}
    cluster = spec["rayClusterConfig"]
    password = cluster["gcsFaultToleranceOptions"]["redisPassword"]
    container = {
        "name": "rest",
        "image": "none",
        "env": [{"name": "PASSWORD", **password}],
        "securityContext": cluster["autoscalerOptions"]["securityContext"],
    }
    metadata = {"name": "rest"}
    yield {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [container]},
    }
