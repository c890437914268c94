"""The service that the HTTP and the gRPC interface share.

An interface parses a request and renders the answer. Everything in between is here: keys, limits,
deadlines, the graph, readiness, and the description for ``/v1/models``.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from app.caching.response_cache import cache_use_of
from app.environment import GATEWAY_TIMEOUT, gateway_timeout_s
from app.errors import (
    MAX_SHOWN,
    BadParameterError,
    ConfigError,
    NotReadyError,
    UnknownModelError,
)
from app.graph.cached import with_cache
from app.graph.ensemble import Ensemble
from app.graph.keys import Keys, read_keys
from app.graph.observer import RequestObserver
from app.graph.on_demand import OnDemandGraph
from app.graph.parameters import checked_threshold, checked_top_k, lane_of
from app.graph.readiness import Readiness
from app.graph.request import (
    AnswerListener,
    BodyReader,
    ClassifyRequest,
    RequestAnswers,
    RequestBody,
    RequestOptions,
)
from app.graph.rolling_update import ForwardingGraph, Graph, run_in_time
from app.graph.served_models import ServedModels, describe
from app.messages import Fault
from app.metrics.meter import meter
from app.metrics.table import REFUSED_BEFORE
from app.queueing.admission import Admission
from app.queueing.byte_budget import ByteBudget
from app.queueing.concurrency_limit import limit_of
from app.queueing.haproxy_headers import refused_before
from app.responses import Classified
from app.scaling.usage import Usage
from app.settings import Settings
from models.model_set import ModelSet
from models.stage_costs import gateway_cpu_ms

# The share of HAProxy's timeout within which a Gateway must answer: later, HAProxy asks another.
OF_GATEWAY_TIMEOUT = 0.8


class EnsembleService:
    """Answers requests with the :class:`Ensemble` of a model set, within the settings' limits.

    Args:
        settings: the settings of this set.
        model_set: the set.
        ensemble: its graph.
        cores: how many cores this process computes on, for the autoscaling policy.
        first: the default set's service, whose keys, usage and ``sets`` the others share. None:
            this is the default set's.
        graph: answers requests; by default ``ensemble`` behind the settings' cache.

    """

    def __init__(
        self,
        settings: Settings,
        model_set: ModelSet,
        ensemble: Ensemble,
        cores: int = 1,
        first: "EnsembleService | None" = None,
        graph: Graph | None = None,
    ) -> None:
        self.settings, self.name = settings, model_set.name
        self.describes(model_set)
        self.num_classes = model_set.manifest.num_classes
        self._is_multi_label = model_set.manifest.is_multi_label
        self._default_top_k = min(settings.default_top_k, self.num_classes)
        self._answer_timeout_s = answer_timeout_s(settings)
        # The services of all sets by name, the default first.
        self.sets: dict[str, EnsembleService] = first.sets if first else {}
        self.sets[self.name] = self
        # Notified of all sets' answers to files; the Gateway adds samples and feedback.
        self.listeners: list[AnswerListener] = first.listeners if first else []
        # The labels of the loaded versions that share the traffic, by NAME@VERSION.
        self.version_labels: Callable[[], Mapping[str, Sequence[str]]] = dict
        self.keys: Keys = first.keys if first else read_keys(settings.api_keys_file)
        expected_ms = gateway_cpu_ms(
            model_set.manifest,
            settings.served_precision,
            decodes=settings.decoder == "gateway",
            has_members=settings.members == "gateway",
        )
        self.usage: Usage = first.usage if first else Usage(cores, expected_ms)
        self.admission = Admission(
            settings.max_concurrent_requests,
            on_refused=self.usage.refused,
            limit=limit_of(settings, cores),
            of_all=not settings.has_several_sets,
        )
        self._byte_budget = ByteBudget(settings.max_bytes_in_flight)
        if first is not None:
            first.admission.is_of_all = False
        self._graph = graph or with_cache(ensemble, settings, model_set)
        self._forwarding_graph = ForwardingGraph(self._graph)
        self._readiness = Readiness(self._forwarding_graph)

    def of_set(self, name: str | None) -> "EnsembleService":
        """Return the service of a set by its name, or this one for None.

        Raises:
            UnknownModelError: no such set is served.

        """
        if name is None:
            return self
        if (service := self.sets.get(name)) is None:
            names = ", ".join(self.sets)
            raise UnknownModelError(
                f"no model set {name[:MAX_SHOWN]!r} is served; there are {names}"
            )
        return service

    def sets_with(self, label: str) -> list[str]:
        """Return the sets, and the versions as NAME@VERSION, that have ``label`` as a class."""
        sets = {name: own.model_set.labels for name, own in self.sets.items()}
        return [
            name for name, labels in {**sets, **self.version_labels()}.items() if label in labels
        ]

    async def answer(
        self, reader: BodyReader, options: RequestOptions, observer: RequestObserver
    ) -> RequestAnswers:
        """Answer every file of a request, in order; a bad file is answered by a :class:`Fault`.

        The time limit ``timeout_s`` includes reading the body. After that the answer may take
        ``answer_timeout_s`` of the settings. ``observer`` was made when the request arrived.

        Raises:
            TandemError: the whole request failed. The body of a refused request is not read,
                unless only the body names the set whose limit refused it.

        """
        if (service := self.of_set(options.model_set)) is not self:
            return await service.answer(reader, options, observer)
        if options.refused_before and (number := refused_before(options.refused_before)):
            meter.count(REFUSED_BEFORE, number)
            self.admission.refused_before(number)
        *_, timeout_s = self._checked(options)
        with self.admission.admit(), self._byte_budget.share() as share:
            with observer.stage("read"):
                async with self.admission.arriving(timeout_s):
                    body = await reader.read(share)
            # The set may have been loaded again, or unloaded, while the body came.
            name = body.model_set
            is_ours = name is not None and name == self.model_set.name
            service = self if is_ours else self.of_set(name)
            if service is self:
                return await self.classify(self._request(body, options, observer, timeout_s))
            if options.model_set is not None:
                raise BadParameterError(
                    f"the metadata model-set says {options.model_set!r}, the message "
                    f"{service.name!r}; name the same set in both, or leave the metadata out"
                )
            num_bytes = share.num_held
        # Only the body named the set: from here on the request counts in that set's limits.
        with service.admission.admit(), service._byte_budget.share() as share:
            share.grow(num_bytes)
            return await service.classify(service._request(body, options, observer, timeout_s))

    async def classify(self, request: ClassifyRequest) -> RequestAnswers:
        """Send an admitted request, whose body has been read, through the graph."""
        with self.usage.under_way(request.num_images):
            answers = await run_in_time(self._forwarding_graph, request)
        request.observer.answered()
        if request.is_of_files:
            for listener in self.listeners:
                listener.note(request.request_id, request.files, answers)
        is_of_all = request.tensors is None or request.tensors.member is None
        if is_of_all and any(map(_is_whole, answers)):
            self._readiness.note_answer()
        return answers

    async def handle_forwarded(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer a request that another Gateway forwarded because its members were replaced.

        Raises:
            OtherSetError: this Gateway's members serve another set, too.
            TandemError: the whole request failed, as in :meth:`answer`.

        """
        with self.admission.admit(), self.usage.under_way(request.num_images):
            answers = await run_in_time(self._graph, request)
        request.observer.answered()
        return answers

    def _checked(self, options: RequestOptions) -> tuple[int, float | None, float]:
        """Return ``top_k``, ``threshold`` and ``timeout_s`` after checks, or their defaults."""
        top_k = self._default_top_k if options.top_k is None else options.top_k
        timeout_s = self.settings.request_timeout_s
        return (
            checked_top_k(top_k, self.num_classes),
            checked_threshold(options.threshold, is_multi_label=self._is_multi_label),
            timeout_s if options.timeout_s is None else min(timeout_s, options.timeout_s),
        )

    def _request(
        self,
        body: RequestBody,
        options: RequestOptions,
        observer: RequestObserver,
        timeout_s: float,
    ) -> ClassifyRequest:
        """Return the request for the graph, with ``timeout_s`` or the settings' shorter limit."""
        answer_s = min(timeout_s, self._answer_timeout_s)
        options = body.options(options)
        top_k, threshold, most_s = self._checked(options)
        control = options.cache_control
        request = ClassifyRequest(
            body.files,
            top_k,
            min(most_s, observer.elapsed_s() + answer_s),
            options.request_id,
            observer,
            tensors=body.tensors,
            cache_use="use" if control is None else cache_use_of(control),
            threshold=threshold,
            traffic_key=options.traffic_key,
        )
        self.admission.holds(request.num_images)
        return request._replace(lane=lane_of(options.priority, request.num_images))

    async def wait_ready(self) -> None:
        await self._readiness.wait()

    @property
    def is_loaded(self) -> bool:
        """Whether the networks are loaded; otherwise the next request loads them."""
        return not isinstance(self._graph, OnDemandGraph) or self._graph.is_loaded

    @property
    def problem(self) -> NotReadyError | None:
        """The error of the last load, if it failed lately; None if requests may be sent."""
        return self._graph.problem if isinstance(self._graph, OnDemandGraph) else None

    async def check_ready(self) -> None:
        """Raise :class:`NotReadyError` unless this set answers, after a load if needed."""
        if (problem := self.problem) is not None:
            raise problem
        if not self.is_loaded:
            return
        try:
            await self._readiness.check()
        except NotReadyError:
            if self.is_loaded:  # an error that is not about loading
                raise

    async def check_all_ready(self) -> None:
        """Check that every loaded set answers; raises as :meth:`check_ready` does."""
        for service in list(self.sets.values()):
            if service.is_loaded:
                await service.check_ready()

    def describes(self, model_set: ModelSet) -> None:
        """Let the service describe itself as another version of its set."""
        self.model_set = model_set
        self.version = model_set.fingerprint(self.settings.served_precision)

    def served_models(self) -> ServedModels:
        return describe(self.model_set, self.settings, list(self.sets))


def _is_whole(answer: Classified | Fault) -> bool:
    """Whether an answer is complete: from every member, and not from the cache."""
    if isinstance(answer, Fault) or answer.cached:
        return False
    return not (answer.degraded or answer.skipped_members)


def answer_timeout_s(settings: Settings) -> float:
    """Return how long this node's Gateways may take to answer, in seconds, after the body.

    Raises:
        ConfigError: this node's HAProxy would give up before a Gateway has to answer.

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
