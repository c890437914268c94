"""The service behind HTTP and gRPC: admits a request, checks its options, runs the graph in time.

An interface parses a request and renders the answer. Everything in between is here: keys, limits,
deadlines, the graph, readiness, and the description for ``/v1/models``.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from app.access import Caller, Keys, read_keys
from app.answers import Classified, Fault, cpu_ms
from app.environment import GATEWAY_TIMEOUT, gateway_timeout_s
from app.errors import (
    MAX_SHOWN,
    BadParameterError,
    ConfigError,
    NotOfferedError,
    NotReadyError,
    SlowBodyError,
    UnknownModelError,
    refused_before,
)
from app.graph.availability import ForwardingGraph, Graph, OnDemandGraph, Readiness, run_in_time
from app.graph.ensemble import Ensemble, with_cache
from app.graph.request import (
    AnswerListener,
    ClassifyRequest,
    RequestAnswers,
    RequestBody,
    RequestOptions,
    cache_use_of,
    checked_plan,
    checked_threshold,
    checked_top_k,
    lane_of,
)
from app.graph.served_models import ServedModels, describe
from app.queueing.admission import Admission, Arriving, ByteBudget, Share, Usage
from app.queueing.fairness import CALLER
from app.queueing.overload import PlanSwitch, limit_of
from app.settings import Settings
from app.telemetry.metric_table import REFUSED_BEFORE
from app.telemetry.metrics import RequestObserver, meter, record_key
from models.ensemble import PlanName
from models.ledger import gateway_cpu_ms
from models.model_set import ModelSet, class_named
from models.record import Precision

# The share of HAProxy's timeout within which a Gateway must answer: later, HAProxy asks another.
OF_GATEWAY_TIMEOUT = 0.8


class EnsembleService:
    """Answers requests with the :class:`Ensemble` of a model set, within the settings' limits.

    This process computes on ``cores``, for the autoscaling policy. ``first`` is the default set's
    service, whose keys, usage and ``sets`` the others share; None: this is the default set's.
    ``graph`` answers requests, by default ``ensemble`` behind the settings' cache.
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
        manifest = model_set.manifest
        self._is_multi_label = manifest.is_multi_label
        self._no_plan, self._no_set = _not_offered(
            model_set,
            settings.served_precision,
            has_combine=settings.combine is not None,
            has_weights=settings.weights is not None,
        )
        is_fast_when_full = settings.when_full == "fast" and self._no_plan is None
        self._default_top_k = min(settings.default_top_k, self.num_classes)
        self._answer_timeout_s = answer_timeout_s(settings)
        # The services of all sets by name, the default first.
        self.sets: dict[str, EnsembleService] = first.sets if first else {}
        self.sets[self.name] = self
        # Notified of all sets' answers to files; the Gateway adds samples and feedback.
        self.listeners: list[AnswerListener] = first.listeners if first else []
        # The loaded versions that share the traffic, by NAME@VERSION.
        self.version_sets: Callable[[], Mapping[str, ModelSet]] = dict
        self.keys: Keys = (
            first.keys
            if first
            else read_keys(settings.api_keys_file, record_key, settings.trusted_proxies)
        )
        self.threads_each = 1  # cores that a batch keeps busy
        expected_ms = gateway_cpu_ms(
            model_set.manifest,
            settings.served_precision,
            settings.plan,
            decodes=settings.decoder == "gateway",
            has_members=settings.members == "gateway",
        )
        self.usage: Usage = first.usage if first else Usage(cores, expected_ms)
        self.admission = Admission(
            settings.max_concurrent_requests,
            on_refused=self.usage.refused,
            limit=limit_of(settings, cores),
            switch=PlanSwitch(settings.max_concurrent_requests) if is_fast_when_full else None,
            of_all=not settings.has_several_sets,
        )
        self.byte_budget = ByteBudget(settings.max_bytes_in_flight)
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

    def labels_named(self, name: str | int) -> dict[str, str]:
        """Return the label of the class that a label, class id or number means.

        The keys are the sets, and the versions as NAME@VERSION, that have the class.
        """
        sets = {key: own.model_set for key, own in self.sets.items()} | dict(self.version_sets())
        places = {key: class_named(name, own.labels, own.class_ids) for key, own in sets.items()}
        return {key: sets[key].labels[n] for key, n in places.items() if n is not None}

    def admit(self, options: RequestOptions, observer: RequestObserver) -> "AdmittedRequest":
        """Return a context manager in which a request counts in the limits of its set.

        ``observer`` was made when the request arrived. Entering the block raises:
            TandemError: the request is refused; nothing of its body should be read.
        """
        return AdmittedRequest(self.of_set(options.model_set), options, observer)

    async def classify(self, request: ClassifyRequest) -> RequestAnswers:
        """Send an admitted request, whose body has been read, through the graph."""
        num_images = request.num_images
        CALLER.set(request.caller)
        self.usage.began(num_images)
        is_done = False
        try:
            answers = await run_in_time(self._forwarding_graph, request)
            is_done = True
        finally:
            self.usage.ended(num_images, done=is_done)
        request.observer.answered()
        if request.caller.has_key:
            self._count(request.caller, answers)
        if self.listeners and request.is_of_files:
            for listener in self.listeners:
                listener.note(request.request_id, request.files, answers)
        is_of_all = request.tensors is None or request.tensors.member is None
        if is_of_all and _has_whole(answers):
            self._readiness.note_answer()
        return answers

    def _count(self, caller: Caller, answers: RequestAnswers) -> None:
        """Count the images of a key, and the CPU time that they took."""
        images = [answer for answer in answers if isinstance(answer, Classified)]
        self.keys.count(caller, "images", len(images))
        computed = [image for image in images if not image.cached]
        used = (cpu_ms(image, self.threads_each, len(computed)) for image in computed)
        self.keys.count(caller, "cpu_ms", sum(used))

    async def handle_forwarded(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer a request that another Gateway forwarded because its members were replaced.

        Raises:
            OtherSetError: this Gateway's members serve another set, too.
            TandemError: the whole request failed, as in :meth:`answer`.
        """
        CALLER.set(request.caller)
        with self.admission.admit(request.caller), self.usage.under_way(request.num_images):
            answers = await run_in_time(self._graph, request)
        request.observer.answered()
        return answers

    def checked(self, options: RequestOptions) -> "CheckedOptions":
        """Return the options after checks, or their defaults."""
        top_k = self._default_top_k if options.top_k is None else options.top_k
        timeout_s, plan = self.settings.request_timeout_s, None
        if options.plan is not None:
            plan = checked_plan(options.plan, self.settings.allowed_plans, self._no_plan)
        if options.has_set and self._no_set is not None:
            raise NotOfferedError(
                f"answer_set is asked for, and {self.name} has no answer sets here; "
                f"{self._no_set}: leave it out"
            )
        if options.embedding is not None:
            self._check_embedding(options.embedding, plan)
        if (num := len(options.regions)) > (most := self.settings.max_files):
            raise BadParameterError(
                f"regions has {num} entries, and a request here has {most} images at most "
                "(setting max_files); send them in several requests"
            )
        return CheckedOptions(
            checked_top_k(top_k, self.num_classes),
            checked_threshold(options.threshold, is_multi_label=self._is_multi_label),
            timeout_s if options.timeout_s is None else min(timeout_s, options.timeout_s),
            plan,
        )

    def _check_embedding(self, name: str, plan: PlanName | None) -> None:
        members = self.model_set.manifest.weights
        if name not in members:
            raise BadParameterError(
                f"embedding is {name[:MAX_SHOWN]!r}; {self.name} has {', '.join(members)}"
            )
        if plan == "fast" and not self._always_asks(name):
            raise NotOfferedError(
                f"embedding is {name}, which the fast plan does not ask about every image: ask for "
                "plan=full, or leave plan out"
            )

    def _always_asks(self, name: str) -> bool:
        """Whether the fast plan asks a member about every image."""
        plan = self.model_set.manifest.fast_plan
        return plan is None or name in plan.steps[0].ask

    def request(
        self,
        body: RequestBody,
        options: RequestOptions,
        checked: "CheckedOptions",
        observer: RequestObserver,
    ) -> ClassifyRequest:
        """Return the request for the graph, with its time limit or the settings' shorter one."""
        if options.caller.sets is not None:
            options.caller.check_set(self.name)
        control, tensors = options.cache_control, body.tensors
        has_pixels = tensors is not None and tensors.pixels is not None
        if options.regions and len(body.files) != 1:
            raise BadParameterError(
                f"regions are of one picture, and the request has {len(body.files)}; send each in "
                "a request of its own"
            )
        num_images = len(tensors.pixels if has_pixels else options.regions or body.files)  # type: ignore[union-attr, arg-type]
        self.admission.holds(num_images)
        lane = lane_of(options.priority, num_images)
        plan, reason = checked.plan or self.settings.plan, None
        if plan == "full" and checked.plan is None and self.admission.is_nearly_full:
            plan, reason = "fast", "load"
        if options.embedding is not None and not self._always_asks(options.embedding):
            plan, reason = "full", None
        return ClassifyRequest(
            body.files,
            checked.top_k,
            min(checked.timeout_s, observer.elapsed_s() + self._answer_timeout_s),
            options.request_id,
            observer,
            "bulk" if options.caller.lane == "bulk" else lane,
            plan,
            reason,
            options.has_set,
            options.regions,
            options.embedding,
            tensors=tensors,
            cache_use="use" if control is None else cache_use_of(control),
            threshold=checked.threshold,
            traffic_key=options.traffic_key,
            caller=options.caller,
        )

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
        """Set the version of the set that the service reports as its own."""
        self.model_set = model_set
        self.version = model_set.fingerprint(self.settings.served_precision)

    def served_models(self) -> ServedModels:
        return describe(self.model_set, self.settings, list(self.sets))


class CheckedOptions(NamedTuple):
    """The options of a request after checks, with the defaults in place of those left out."""

    top_k: int
    threshold: float | None  # of a multi-label set's scores; None: the set's own
    timeout_s: float  # from the request's arrival
    plan: PlanName | None  # that the request asks for


class AdmittedRequest:
    """A request that counts in its set's limits, from before its body is read to its answer.

    A context manager::

        with service.admit(options, observer) as admitted:
            async with admitted.arriving():
                body = ...  # read by the interface; its bytes count in admitted.share
            answers = await admitted.answer(body)
    """

    __slots__ = ("_checked", "_is_counted", "_observer", "_options", "_service", "share")

    share: Share  # the bytes of the body that are held

    def __init__(
        self, service: EnsembleService, options: RequestOptions, observer: RequestObserver
    ) -> None:
        self._service, self._options, self._observer = service, options, observer
        self._is_counted = False

    def __enter__(self) -> Self:
        service, options = self._service, self._options
        if options.refused_before and (number := refused_before(options.refused_before)):
            meter.count(REFUSED_BEFORE, number)
            service.admission.refused_before(number)
        if options.caller.sets is not None and options.model_set is not None:  # or in the body
            options.caller.check_set(service.name)
        self._checked = service.checked(options)
        self._begin(service)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(is_answered=kind is None)

    def _begin(self, service: EnsembleService) -> None:
        service.admission.begin(self._options.caller)
        self._is_counted = True
        self._service, self.share = service, Share(service.byte_budget)

    def _end(self, *, is_answered: bool) -> None:
        if self._is_counted:
            self._is_counted = False
            self.share.free()
            self._service.admission.end(self._options.caller, is_answered=is_answered)

    def arriving(self) -> "ArrivingBody":
        """Return an asynchronous context manager that times and limits the body's arrival.

        Leaving the block raises:
            SlowBodyError: the body took longer than the request's time limit, or it was slow and
                another request needed its place.
        """
        arriving = self._service.admission.arriving(self._checked.timeout_s)
        return ArrivingBody(arriving, self._observer, self.share)

    async def answer(self, body: RequestBody) -> RequestAnswers:
        """Answer every file of the body, in order; a bad file is answered by a :class:`Fault`.

        The time limit ``timeout_s`` includes reading the body. After that the answer may take
        ``answer_timeout_s`` of the settings.

        Raises:
            TandemError: the whole request failed.
        """
        # The set may have been loaded again, or unloaded, while the body came.
        name, before = body.model_set, self._service
        service = before if name == before.model_set.name else before.of_set(name)
        if service is not before:
            self._move_to(service)
        options, checked = body.options(self._options), self._checked
        if options is not self._options or service is not before:
            checked = service.checked(options)
            checked = checked._replace(timeout_s=min(checked.timeout_s, self._checked.timeout_s))
        request = service.request(body, options, checked, self._observer)
        return await service.classify(request)

    def _move_to(self, service: EnsembleService) -> None:
        """Move the request to the limits of the set that the body names."""
        if self._options.model_set is not None:
            raise BadParameterError(
                f"the metadata model-set says {self._options.model_set!r}, the message "
                f"{service.name!r}; name the same set in both, or leave the metadata out"
            )
        num_bytes = self.share.num_held
        self._end(is_answered=True)
        self._begin(service)
        self.share.grow(num_bytes)


class ArrivingBody:
    """Times the arrival of a body, as the stage ``read``, and limits it (see ``Arriving``)."""

    __slots__ = ("_arriving", "_observer", "_share", "_start_ms")

    def __init__(self, arriving: Arriving, observer: RequestObserver, share: Share) -> None:
        self._arriving, self._observer, self._share = arriving, observer, share
        self._start_ms = observer.elapsed_ms()

    async def __aenter__(self) -> None:
        await self._arriving.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._arriving.__aexit__(*error)
        except SlowBodyError as late:
            if (came := self._share.num_held) and (announced := self._share.num_announced):
                text = f"{late.message}; {came} of {announced} bytes had come"
                raise SlowBodyError(text) from late
            raise
        finally:
            self._observer.stage_ended("read", self._start_ms)


def _has_whole(answers: RequestAnswers) -> bool:
    """Whether an answer is complete: from every member, and not from the cache."""
    for answer in answers:
        if isinstance(answer, Fault) or answer.cached:
            continue
        if not (answer.degraded or answer.skipped_members):
            return True
    return False


def _not_offered(
    model_set: ModelSet, precision: Precision, *, has_combine: bool, has_weights: bool
) -> tuple[str | None, str | None]:
    """Return why no request gets a fast plan, and why none an answer set; None if it may."""
    manifest, name = model_set.manifest, model_set.argument
    if has_combine:
        why = "the service's own combine makes its answers, from every member"
        return why, why
    no_plan = manifest.plan_problem(precision, name)
    no_set = f"tandem evaluate {name} --images DIR --sure-at 0.95 measures their bound"
    if manifest.is_multi_label:
        no_set = "its classes do not exclude each other"
    elif has_weights:
        no_plan = "the setting weights replaces the members that a plan is of"
        no_set = "nothing was measured for the members and shares of the setting weights"
    return no_plan, None if manifest.answer_set is not None else no_set


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
