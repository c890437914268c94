"""The table of all metrics: name, description and tags; dashboard and alert rules use no others.

Ray adds ``ray_`` before a name and ``_total`` after a counter's, and its own tags: deployment,
replica, application, and the node's address.
"""

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
# A photo takes 8 to 60 ms, depending on the machine. The buckets reach from a quarter of a ms for
# stages to the 10 s of a deadline.
BUCKETS_MS = (
    *(0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 80.0, 100.0),
    *(150.0, 200.0, 300.0, 400.0, 500.0, 1000.0, 2500.0, 10_000.0),
)


@dataclass(frozen=True)
class Metric:
    """A metric; ``when`` names the event after which it has values, if not from the start."""

    name: str
    kind: MetricKind
    text: str
    tags: tuple[str, ...] = ()
    when: str = ""

    @property
    def parts(self) -> tuple["Metric", ...]:
        """The metrics that Ray gets: a histogram is sent as gauges of its counts.

        Ray's own histogram takes values one by one, in the replica and again in Ray's agent. That
        costs several times as much, and its sum is not exact (decision 0044).
        """
        if self.kind != "histogram":
            return (self,)
        tags = {"bucket": (*self.tags, "le"), "sum": self.tags, "count": self.tags}
        return tuple(Metric(f"{self.name}_{part}", "gauge", self.text, tags[part]) for part in tags)


def _counter(name: str, text: str, tags: str = "", when: str = "") -> Metric:
    return Metric(name, "counter", text, tuple(tags.split()), when)


def _gauge(name: str, text: str, tags: str = "", when: str = "") -> Metric:
    return Metric(name, "gauge", text, tuple(tags.split()), when)


def _histogram(name: str, text: str, tags: str) -> Metric:
    return Metric(name, "histogram", text, tuple(tags.split()))


REQUESTS = _counter(
    "tandem_requests",
    "requests by route and HTTP status, also over gRPC; 499: the client hung up; operation: "
    "classify on every route that classifies images, else other",
    "route status operation",
)
KEY_REQUESTS = _counter(
    "tandem_key_requests",
    "requests by the name of their key, but those that HAProxy refused; unnamed: the key has no "
    "name; hidden: key_names_in_metrics is false; result: answered, refused (403, 429), or failed",
    "key result",
    when="there are keys",
)
KEY_IMAGES = _counter(
    "tandem_key_images", "images answered, by the name of the key", "key", when="there are keys"
)
KEY_CPU_MS = _counter(
    "tandem_key_cpu_ms",
    "CPU time of decoding and of the networks, by the name of the key; a batch's images share its",
    "key",
    when="there are keys",
)
REFUSED_BEFORE = _counter(
    "tandem_refused_before",
    "requests to classify that HAProxy refused (429) before they reached a Gateway; reported when "
    "HAProxy next forwards a request",
    when="HAProxy refuses requests",
)
REQUEST_MS = _histogram(
    "tandem_request_ms",
    "a request to classify, from its arrival at the Gateway to the answer's last byte",
    "status",
)
STAGE_MS = _histogram(
    "tandem_stage_ms",
    "duration of a stage: read, cache, preprocess, combine and encode per request; decode per "
    "image; queue and infer per image and member",
    "stage member",
)
ANSWERS = _counter(
    "tandem_answers",
    "classified images; agreed: yes, no, or alone if a single member answered; sure: yes, no, or "
    "unknown if the set has no threshold or a member is missing; model_version: the set's "
    "fingerprint",
    "agreed degraded sure model_version",
)
ENTROPY = _counter(
    "tandem_answer_entropy",
    "entropy of the answers' probabilities, summed; each 0 (sure) to 1 (all classes alike)",
)
SKIPPED = _counter(
    "tandem_skipped_members",
    "images that the fast plan answered without this member",
    "member",
    when="requests are answered by the fast plan",
)
PLAN_STEPS = _counter(
    "tandem_plan_answers",
    "images by plan; asked: how many members; reason: load, if the service chose the plan itself "
    "(when_full), or none",
    "plan asked reason",
)
CACHE_LOOKUPS = _counter(
    "tandem_cache_lookups",
    "images looked up in the response cache; result: hit, miss, or shared (another request was "
    "computing it)",
    "result",
    when="cache is set",
)
CACHE_REDIS = _counter(
    "tandem_cache_redis",
    "images looked up in Redis (hit, miss, bad: damaged, failed, skipped: Redis failed lately) and "
    "written to Redis (written, unwritten)",
    "result",
    when="cache is redis://",
)
CACHE_BYTES = _gauge(
    "tandem_cache_bytes",
    "memory of a Gateway's response cache, at most cache_mib; with several sets, of the set that "
    "was asked last",
    when="cache is set",
)
CACHE_EVICTIONS = _counter(
    "tandem_cache_evictions",
    "images that a Gateway's response cache evicted, least recently used first",
    when="cache is set",
)
TRAFFIC_SHARE = _gauge(
    "tandem_traffic_share",
    "percent of requests that a version answers, by the plan that the Gateway serves",
    "model_version",
    when="traffic or shadow is set",
)
TRAFFIC_COPIES = _counter(
    "tandem_traffic_copies",
    "copies of images sent to a version in the shadow lane; result: computed, failed, or dropped "
    "(the service was busy)",
    "model_version result",
    when="traffic or shadow is set",
)
TRAFFIC_COMPARED = _counter(
    "tandem_traffic_compared",
    "images that both this version and the main version answered; agreed: yes if both have the "
    "same first choice (in a multi-label set the same labels), or no",
    "model_version agreed",
    when="traffic or shadow is set",
)
TRAFFIC_VARIATION = _counter(
    "tandem_traffic_variation",
    "total variation between the probabilities of this and the main version, summed; 0 to 1 each",
    "model_version",
    when="traffic or shadow is set",
)
FAILED_FUNCTIONS = _counter(
    "tandem_failed_functions",
    "calls of the operator's own function (stage: preprocess, combine) that raised, or whose "
    "result did not fit; the request was answered 500",
    "stage",
    when="preprocess or combine fails",
)
MEMBER_IMAGES = _counter("tandem_member_images", "images that a member's network ran", "member")
BATCHES = _counter("tandem_batches", "batches that a member ran, by size", "member size")
FAILED_BATCHES = _counter(
    "tandem_failed_batches",
    "batches that raised; their images were run again one by one",
    "member",
    when="a batch fails",
)
QUEUE_LENGTH = _gauge("tandem_queue_length", "images that wait for a member", "member")
QUEUE_AGE_MS = _gauge("tandem_queue_age_ms", "age of the oldest waiting image", "member")
GOLDEN_PASSED = _gauge(
    "tandem_golden_passed", "1 if the last golden check passed, else 0", "member"
)
FAILED_GOLDEN_CHECKS = _counter(
    "tandem_failed_golden_checks",
    "golden checks that failed: the replica ended, or refused a version that it was to load; Ray "
    "keeps the count when the replica is gone",
    "member",
    when="a golden check fails",
)
GOLDEN_MS = _gauge("tandem_golden_ms", "duration of the golden check", "member")
SAMPLES = _counter(
    "tandem_samples",
    "images chosen by sample_ratio, or on which versions disagree; result: written, dropped (the "
    "queue was full, or sample_mib reached), or failed",
    "result",
    when="sample_dir is set",
)
FEEDBACK = _counter(
    "tandem_feedback",
    "labels that callers reported for their answers; right: yes, or no where the answer differed",
    "right model_version plan",
    when="feedback is reported",
)
DROPPED_SPANS = _gauge(
    "tandem_dropped_spans", "spans lost since the replica began", "sink", when="tracing is on"
)
CLOCK_STEPS = _gauge(
    "tandem_clock_steps", "how often the system clock was set since the replica began"
)
PROCESS_CPU_MS = _counter("tandem_process_cpu_ms", "CPU time of the replica's process")
PROCESS_MEMORY = _gauge("tandem_process_memory_bytes", "resident memory of the replica's process")
METRICS = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))
