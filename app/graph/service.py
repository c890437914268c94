"""The application's one service, which the HTTP and the gRPC interface both take as an argument.

An interface parses a request and renders the answer. Everything between is here: keys, limits,
deadlines, the graph, readiness, and what ``/v1/models`` shows.
"""

import time
from collections.abc import Callable

from app.calls.stage_errors import OF_RAY, as_tandem
from app.errors import MORE_TIME, DeadlineError
from app.graph.answer_timeout import answer_timeout_s
from app.graph.cached import with_cache
from app.graph.ensemble import Ensemble
from app.graph.intake import Intake, ReadFiles, RequestOptions
from app.graph.keys import read_keys
from app.graph.readiness import Readiness
from app.graph.request import ClassifyRequest, ForwardedRequest, RequestAnswers
from app.graph.rolling_update import PeerGateways
from app.graph.timeline import Timeline
from app.messages import Fault
from app.queueing.admission import Admission
from app.queueing.byte_budget import ByteBudget
from app.queueing.concurrency_limit import limit_of
from app.queueing.deadlines import Deadlines
from app.responses import Classified, ServedMember, ServedModels, ServedRuntime
from app.scaling.costs import gateway_cpu_ms
from app.scaling.usage import Usage
from app.settings import Settings
from models.extras import installed_version
from models.ledger import judge
from models.manifest import MemberRecord
from models.model_set import ModelSet
from models.record import PACKAGES, Precision


class EnsembleService:
    """Answers requests with an :class:`Ensemble`, within the settings' limits.

    Args:
        settings: the application's.
        model_set: the set that ``ensemble`` serves.
        ensemble: the graph.
        cores: that this process computes on, as the autoscaling policy is told.
        cpu_s: gives the CPU time that it has taken, in s, with all that works for it alone.

    """

    def __init__(
        self,
        settings: Settings,
        model_set: ModelSet,
        ensemble: Ensemble,
        cores: int = 1,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        self.settings, self._model_set, self._ensemble = settings, model_set, ensemble
        self.num_classes = model_set.manifest.num_classes
        self.keys = read_keys(settings)
        self.usage = Usage(cores, gateway_cpu_ms(model_set.manifest, settings), cpu_s)
        answer_s = answer_timeout_s(settings)
        self._deadlines = Deadlines()
        self.admission = Admission(
            settings.max_concurrent_requests,
            on_refused=self.usage.refused,
            limit=limit_of(settings, cores),
            usual_timeout_s=answer_s,
            deadlines=self._deadlines,
        )
        self._intake = Intake(
            settings,
            self.num_classes,
            self.classify,
            self.admission,
            ByteBudget(settings.max_bytes_in_flight),
            answer_s,
            is_multi_label=model_set.manifest.task == "multi_label",
        )
        self._graph = with_cache(ensemble, settings, model_set)
        self._peers = PeerGateways(self._graph)
        self._readiness = Readiness(self.classify)

    async def answer(
        self, read: ReadFiles, options: RequestOptions, timeline: Timeline
    ) -> RequestAnswers:
        """Admit a request, read its files and classify them; see :meth:`Intake.answer`."""
        return await self._intake.answer(read, options, timeline)

    async def classify(self, request: ClassifyRequest) -> RequestAnswers:
        """Answer every file, in order; a bad file's answer is its fault and spoils nothing.

        Raises:
            OverloadedError, DeadlineError, NotReadyError: for the request as a whole.

        """
        num_counted = 0 if request.is_probe else request.num_images
        try:
            with self.usage.under_way(num_counted), self._deadlines.within(request.left_s):
                answers = await self._peers.classify(request)
        except TimeoutError as error:
            raise DeadlineError(
                f"no answer within {request.timeout_s:.3g} s; "
                f"the service is busy or a member hangs: {MORE_TIME}"
            ) from error
        except OF_RAY as error:
            raise as_tandem(error) from error
        is_of_all = request.tensors is None or request.tensors.member is None
        if is_of_all and any(map(_is_whole, answers)):
            self._readiness.note_answer()
        return answers

    async def handle_forwarded(self, forwarded: ForwardedRequest) -> RequestAnswers:
        """Answer a request of another Gateway, whose members were replaced.

        Raises:
            OtherSetError: the members of this one's model set are not there either.

        """
        return await self._graph.run(forwarded.request())

    def check_health(self) -> None:
        """Raise :class:`UnhealthyError` if a call of the operator's function does not end."""
        self._ensemble.check_health()

    async def wait_ready(self) -> None:
        """Return when the graph has answered."""
        await self._readiness.wait()

    async def check_ready(self) -> None:
        """Return if the graph answers.

        Raises:
            NotReadyError: a stage does not.

        """
        await self._readiness.check()

    def served_models(self) -> ServedModels:
        """Describe what is served: the answer of ``/v1/models``."""
        manifest, precision = self._model_set.manifest, self.settings.precision
        cascade = self._ensemble.cascade
        return ServedModels(
            model_set=manifest.name,
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
