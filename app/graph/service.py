"""The application's one service, which the HTTP and the gRPC interface both take as an argument.

An interface parses a request and renders the answer. Everything between is here: keys, limits,
deadlines, the graph, readiness, and what ``/v1/models`` shows.
"""

import math

from app.caching.response_cache import cache_use_of
from app.environment import GATEWAY_TIMEOUT, gateway_timeout_s
from app.errors import ConfigError
from app.graph.cached import with_cache
from app.graph.ensemble import Ensemble
from app.graph.keys import read_keys
from app.graph.observer import RequestObserver
from app.graph.parameters import checked_threshold, checked_top_k, lane_of
from app.graph.readiness import Readiness
from app.graph.request import (
    BodyReader,
    ClassifyRequest,
    RequestAnswers,
    RequestBody,
    RequestOptions,
)
from app.graph.rolling_update import ForwardingGraph, run_in_time
from app.messages import Fault
from app.metrics.meter import meter
from app.metrics.table import REFUSED_BEFORE
from app.queueing.admission import Admission
from app.queueing.byte_budget import ByteBudget
from app.queueing.concurrency_limit import limit_of
from app.queueing.haproxy_headers import refused_before
from app.responses import Classified, ServedMember, ServedModels, ServedRuntime
from app.scaling.costs import gateway_cpu_ms
from app.scaling.usage import Usage
from app.settings import Settings
from models.extras import installed_version
from models.ledger import judge
from models.manifest import MemberRecord
from models.model_set import ModelSet
from models.record import PACKAGES, Precision

# Of the time that HAProxy waits for a Gateway before it asks another one.
OF_GATEWAY_TIMEOUT = 0.8


class EnsembleService:
    """Answers requests with an :class:`Ensemble` of ``model_set``, within the settings' limits.

    ``cores``: that this process computes on, as the autoscaling policy is told.
    """

    def __init__(
        self,
        settings: Settings,
        model_set: ModelSet,
        ensemble: Ensemble,
        cores: int = 1,
    ) -> None:
        self.settings, self._model_set, self._ensemble = settings, model_set, ensemble
        self.num_classes = model_set.manifest.num_classes
        self._is_multi_label = model_set.manifest.task == "multi_label"
        self._default_top_k = min(settings.default_top_k, self.num_classes)
        self._answer_timeout_s = answer_timeout_s(settings)
        self.keys = read_keys(settings)
        self.usage = Usage(cores, gateway_cpu_ms(model_set.manifest, settings))
        self.admission = Admission(
            settings.max_concurrent_requests,
            on_refused=self.usage.refused,
            limit=limit_of(settings, cores),
        )
        self._byte_budget = ByteBudget(settings.max_bytes_in_flight)
        self._graph = with_cache(ensemble, settings, model_set)
        self._forwarding_graph = ForwardingGraph(self._graph)
        self._readiness = Readiness(self._forwarding_graph)

    async def answer(
        self, reader: BodyReader, options: RequestOptions, observer: RequestObserver
    ) -> RequestAnswers:
        """Answer every file of a request, in order; a bad file's answer is its fault.

        A request has ``timeout_s`` in all, reading its body included, and from then on at most the
        ``answer_timeout_s`` of the settings for its answer. Its observer was made when it arrived.

        Raises:
            TandemError: for the request as a whole; nothing was read if it was not admitted.

        """
        if options.refused_before and (number := refused_before(options.refused_before)):
            meter.count(REFUSED_BEFORE, number)
            self.admission.refused_before(number)
        options = self._checked(options)
        assert options.timeout_s is not None
        with self.admission.admit(), self._byte_budget.share() as share:
            with observer.stage("read"):
                async with self.admission.arriving(options.timeout_s):
                    body = await reader.read(share)
            answer_s = min(options.timeout_s, self._answer_timeout_s)
            request = self._request(body, self._checked(body.options(options)), observer, answer_s)
            self.admission.holds(request.num_images)
            return await self.classify(request)

    async def classify(self, request: ClassifyRequest) -> RequestAnswers:
        """Send a request that has been admitted and read through the graph.

        Raises:
            OverloadedError, DeadlineError, NotReadyError: for the request as a whole.

        """
        with self.usage.under_way(request.num_images):
            answers = await run_in_time(self._forwarding_graph, request)
        request.observer.answered()
        is_of_all = request.tensors is None or request.tensors.member is None
        if is_of_all and any(map(_is_whole, answers)):
            self._readiness.note_answer()
        return answers

    async def handle_forwarded(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer a request of another Gateway, whose members were replaced.

        Raises:
            OtherSetError: the members of this one's model set are not there either.
            TandemError: for the request as a whole, as in :meth:`answer`.

        """
        with self.admission.admit(), self.usage.under_way(request.num_images):
            answers = await run_in_time(self._graph, request)
        request.observer.answered()
        return answers

    def _checked(self, options: RequestOptions) -> RequestOptions:
        """Return the options as they count: with the defaults, and within the limits."""
        top_k = self._default_top_k if options.top_k is None else options.top_k
        timeout_s = self.settings.request_timeout_s
        return options._replace(
            top_k=checked_top_k(top_k, self.num_classes),
            threshold=checked_threshold(options.threshold, is_multi_label=self._is_multi_label),
            timeout_s=timeout_s if options.timeout_s is None else min(timeout_s, options.timeout_s),
        )

    def _request(
        self, body: RequestBody, options: RequestOptions, observer: RequestObserver, answer_s: float
    ) -> ClassifyRequest:
        """Return what the graph is asked; it has ``answer_s`` from now."""
        assert options.top_k is not None
        assert options.timeout_s is not None
        control = options.cache_control
        request = ClassifyRequest(
            body.files,
            options.top_k,
            min(options.timeout_s, observer.elapsed_s() + answer_s),
            options.request_id,
            observer,
            tensors=body.tensors,
            cache_use="use" if control is None else cache_use_of(control),
            threshold=options.threshold,
        )
        return request._replace(lane=lane_of(options.priority, request.num_images))

    def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a call of the operator's function does not end."""
        self._ensemble.check_health()

    async def wait_ready(self) -> None:
        await self._readiness.wait()

    async def check_ready(self) -> None:
        """Return if the graph answers; :class:`NotReadyError`: a stage does not."""
        await self._readiness.check()

    def served_models(self) -> ServedModels:
        """Describe what is served: the answer of ``/v1/models``."""
        manifest, precision = self._model_set.manifest, self.settings.served_precision
        cascade = self._ensemble.cascade
        return ServedModels(
            model_set=manifest.name,
            model_version=self._model_set.fingerprint(precision),
            description=manifest.description,
            hint=manifest.hint,
            task=manifest.task,
            threshold=manifest.threshold,
            input_size=manifest.image.input_size,
            labels=list(self._model_set.labels),
            max_drop=manifest.max_drop,
            verified=judge(manifest, precision).status,
            members=[
                ServedMember(
                    name=m.name,
                    precision=precision,
                    input_size=manifest.image_of(m.name).input_size,
                    weight=m.weight,
                    source=m.source,
                    runtime=_runtime_of(m, precision),
                )
                for m in manifest.members
            ],
            accuracy=[record.model_dump(mode="json") for record in manifest.accuracy],
            sure=manifest.sure.model_dump(mode="json") if manifest.sure else None,
            cascade_margin=cascade.margin if cascade else None,
            preprocess=self.settings.preprocess,
            combine=self.settings.combine,
        )


def _runtime_of(member: MemberRecord, precision: Precision) -> ServedRuntime:
    """Return what runs a member, by what is installed here: nothing is imported for it."""
    name = member.network(precision).runtime
    return ServedRuntime(name, installed_version(PACKAGES[name]) or "unknown")


def _is_whole(answer: Classified | Fault) -> bool:
    """Whether every member answered, and not for a request before."""
    if isinstance(answer, Fault) or answer.cached:
        return False
    return not (answer.degraded or answer.skipped_members)


def answer_timeout_s(settings: Settings) -> float:
    """Return how long a Gateway of this node may take once it has the body.

    Raises:
        ConfigError: this node's HAProxy would give up a Gateway that may still answer.

    """
    own_s, haproxy_s = settings.answer_timeout_s, gateway_timeout_s()
    most_s = math.inf if haproxy_s is None else OF_GATEWAY_TIMEOUT * haproxy_s
    if own_s is not None and own_s > most_s:
        raise ConfigError(
            f"answer_timeout_s is {own_s:g}, and after {haproxy_s:g} s without an answer HAProxy "
            f"asks another Gateway ({GATEWAY_TIMEOUT}, from tandem environment): set it to "
            f"{most_s:g} at most, or leave it out"
        )
    return min(own_s or most_s, settings.request_timeout_s)
