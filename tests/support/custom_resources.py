"""Custom resources as their operators define them, strictly: an unknown field is an error.

The fields that the manifests use, after the references of KubeRay 1.7 (ray.io/v1) and of the
Prometheus operator 0.93 (monitoring.coreos.com/v1). What these have of Kubernetes' own (pods,
sources of variables) is checked by its schemas. KServe's are checked by its Python SDK.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, create_model

from tests.support.manifests import pods

Spec, Labels = dict[str, Any], dict[str, str]
Duration = Annotated[str, StringConstraints(pattern=r"^(\d+(ms|s|m|h|d|w|y))+$")]


def of(name: str, /, **fields: Any) -> Any:
    """Return a model without other fields; those that may be None may be missing."""
    strict = ConfigDict(extra="forbid", strict=True)
    known = {key: (t, None if type(None) in get_args(t) else ...) for key, t in fields.items()}
    return create_model(name, __config__=strict, **known)  # type: ignore[call-overload]


def resource(kind: str, version: str, spec: Any) -> Any:
    return of(kind, apiVersion=Literal[version], kind=Literal[kind], metadata=METADATA, spec=spec)


def _names_differ(groups: list[BaseModel]) -> list[BaseModel]:
    if len({group.name for group in groups}) < len(groups):  # type: ignore[attr-defined]
        raise ValueError("two groups of one name")
    return groups


METADATA = of("Metadata", name=str, labels=Labels | None)
FAULT_TOLERANCE = of(
    "GcsFaultTolerance", redisAddress=str, redisPassword=of("Credential", valueFrom=Spec)
)
AUTOSCALER = of(
    "AutoscalerOptions",
    securityContext=Spec,
    volumeMounts=list[Spec] | None,  # type: ignore[valid-type]
    idleTimeoutSeconds=int | None,
    upscalingMode=Literal["Default", "Aggressive", "Conservative"] | None,
)
WORKERS = of(
    "WorkerGroup",
    groupName=str,
    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), int),
    rayStartParams=Labels,
    template=Spec,
)
CLUSTER = of(
    "RayCluster",
    rayVersion=str,
    authOptions=of("AuthOptions", mode=Literal["disabled", "token"]) | None,
    gcsFaultToleranceOptions=FAULT_TOLERANCE | None,
    enableInTreeAutoscaling=bool | None,
    autoscalerOptions=AUTOSCALER | None,
    headGroupSpec=of("HeadGroup", rayStartParams=Labels, template=Spec),
    workerGroupSpecs=list[WORKERS],  # type: ignore[valid-type]
)
UPGRADE = Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]
SERVICE = of(
    "RayServiceSpec",
    serveConfigV2=str,
    rayClusterConfig=CLUSTER,
    upgradeStrategy=of("UpgradeStrategy", type=UPGRADE) | None,
    excludeHeadPodFromServeSvc=bool | None,
)
JOB = of(
    "RayJobSpec",
    backoffLimit=int | None,
    rayClusterSpec=CLUSTER,
    submitterPodTemplate=Spec,
    entrypoint=str,
    ttlSecondsAfterFinished=int | None,
    shutdownAfterJobFinishes=bool | None,
)
ACTION = Literal["keep", "drop", "replace", "labeldrop", "labelkeep"]
RELABELING = of("Relabeling", sourceLabels=list[str] | None, regex=str | None, action=ACTION)
ENDPOINT = of(
    "MetricsEndpoint",
    port=str,
    path=str,
    interval=Duration | None,
    metricRelabelings=list[RELABELING] | None,  # type: ignore[valid-type]
)
MONITOR = of(
    "PodMonitorSpec",
    selector=of("LabelSelector", matchLabels=Labels),
    podMetricsEndpoints=list[ENDPOINT],  # type: ignore[valid-type]
)
RULE = of(
    "Rule",
    **dict.fromkeys(("record", "alert"), str | None),
    expr=str,
    **{"for": Duration | None},
    **dict.fromkeys(("labels", "annotations"), Labels | None),
)
GROUP = of("RuleGroup", name=Annotated[str, Field(min_length=1)], rules=list[RULE])  # type: ignore[valid-type]
RULES = of("PrometheusRuleSpec", groups=Annotated[list[GROUP], AfterValidator(_names_differ)])  # type: ignore[valid-type]
KINDS: dict[str, Any] = {
    "RayService": resource("RayService", "ray.io/v1", SERVICE),
    "RayJob": resource("RayJob", "ray.io/v1", JOB),
    "PodMonitor": resource("PodMonitor", "monitoring.coreos.com/v1", MONITOR),
    "PrometheusRule": resource("PrometheusRule", "monitoring.coreos.com/v1", RULES),
}


def kubernetes_parts(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return what a custom resource has of Kubernetes' own, as resources of that kind."""
    for template in pods(document) if document["kind"] in ("RayService", "RayJob") else ():
        metadata = {"name": "pod", **template.get("metadata", {})}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    if document["kind"] == "RayService":
        cluster = document["spec"]["rayClusterConfig"]
        container = {
            "name": "rest",
            "image": "none",
            "env": [{"name": "PASSWORD", **cluster["gcsFaultToleranceOptions"]["redisPassword"]}],
            **{k: cluster["autoscalerOptions"][k] for k in ("securityContext", "volumeMounts")},
        }
        pod = {"metadata": {"name": "rest"}, "spec": {"containers": [container]}}
        yield {"apiVersion": "v1", "kind": "Pod", **pod}
