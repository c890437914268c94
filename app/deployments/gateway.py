"""The Gateway: the graph's root. Sends a request through the stages and keeps its time.

HTTP itself is in :mod:`app.http.api`; no pixel is touched here.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray.serve.grpc_util import RayServegRPCContext

from app.calls.call import InProcess, call, instantiate
from app.calls.stage_errors import OF_RAY, as_tandem
from app.compute.inference_threads import replica_inference_threads
from app.environment import answer_timeout_s
from app.errors import MORE_TIME, DeadlineError
from app.graph.cascade import cascade_of
from app.graph.members import MemberResults, Members
from app.graph.readiness import Readiness
from app.graph.request import ClassifyRequest
from app.graph.rolling_update import PeerGateways, check_same_model_set, handed_over
from app.grpc.interface import answer_classify
from app.grpc.tandem_pb2 import ClassifyReply
from app.grpc.tandem_pb2 import ClassifyRequest as ClassifyMessage
from app.http.api import create_api
from app.http.auth import read_keys
from app.messages import Combined, Decoded, Fault
from app.metrics.replica import start_metrics
from app.metrics.responses import record_answers
from app.queueing.admission import Admission
from app.queueing.byte_budget import ByteBudget
from app.responses import Classified, ServedMember, ServedModels, classified
from app.scaling.costs import gateway_cpu_ms
from app.scaling.usage import Usage
from app.settings import Settings
from app.tracing.pipeline import pipeline
from models.ledger import judge
from models.model_set import load_model_set


class Gateway:
    """Decoder, then every member in parallel (or the cascade), then the Combiner."""

    def __init__(
        self, settings: Settings, decoder: Any, members: Mapping[str, Any], combiner: Any
    ) -> None:
        self.settings = settings
        pipeline.start(settings, is_ingress=True)
        start_metrics()
        self._model_set = load_model_set(settings.model_set, settings.model_search)
        has_own = any(isinstance(member, InProcess) for member in members.values())
        threads = replica_inference_threads(settings) if has_own else None
        self._decoder, self._combiner = instantiate(decoder), instantiate(combiner)
        every = {name: instantiate(member, threads) for name, member in members.items()}
        own = (name for name, member in members.items() if isinstance(member, InProcess))
        self._own_members = [every[name] for name in own]
        policy, patience_s = settings.answer_policy, settings.member_patience_s
        self._fingerprint = self._model_set.fingerprint(settings.precision)
        self._members = Members(every, policy, patience_s, fingerprint=self._fingerprint)
        self._cascade = cascade_of(every, settings, self._fingerprint)
        self._peers = PeerGateways(self._through_the_graph)
        self._has_started = len(self._own_members) == len(every)
        self._readiness = Readiness(self.classify)
        self.answer_timeout_s = answer_timeout_s(
            settings.answer_timeout_s, settings.request_timeout_s
        )
        self.keys = read_keys(settings)
        self.byte_budget = ByteBudget(settings.max_bytes_in_flight)
        # Without members of its own the process computes on its one loop.
        cores = threads.cores if threads else 1
        self._usage = Usage(cores, gateway_cpu_ms(self._model_set.manifest, settings))
        self.admission = Admission(settings.max_concurrent_requests, on_refused=self._usage.refused)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell the autoscaling policy; Serve calls this when the Gateway scales."""
        return self._usage.figures()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new queue settings for the members of this process (:class:`QueueConfig`)."""
        for member in self._own_members:
            member.reconfigure(user_config)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the HTTP interface; Serve calls this once per replica."""
        return create_api(self)

    async def Classify(
        self, request: ClassifyMessage, grpc_context: RayServegRPCContext
    ) -> ClassifyReply:
        """Answer a gRPC call; Serve finds it, and the context's argument, by their names."""
        return await answer_classify(self, request, grpc_context)

    @property
    def num_classes(self) -> int:
        """How many classes an answer can have."""
        return self._model_set.manifest.num_classes

    async def check_health(self) -> None:
        """Tell Serve whether this replica works; one that does not is replaced.

        Serve asks before it sends the first request: that waits until the members answer, so that
        in a rolling update no Gateway is there before its members are.

        Raises:
            UnhealthyError: a member of this process fails or hangs.

        """
        if not self._has_started:
            await self._readiness.wait()
            self._has_started = True
        for member in self._own_members:
            await member.check_health()

    async def classify(self, request: ClassifyRequest) -> list[Classified | Fault]:
        """Answer every file, in order; a bad file's answer is its fault and spoils nothing.

        Raises:
            OverloadedError, DeadlineError, NotReadyError: for the request as a whole.

        """
        num_counted = 0 if request.is_probe else len(request.files)
        try:
            with self._usage.under_way(num_counted):
                async with asyncio.timeout(request.left_s):
                    return await self._peers.classify(request)
        except TimeoutError as error:
            raise DeadlineError(
                f"no answer within {request.timeout_s:.3g} s; "
                f"the service is busy or a member hangs: {MORE_TIME}"
            ) from error
        except OF_RAY as error:
            raise as_tandem(error) from error

    async def handle_forwarded(self, *fields: Any) -> list[Classified | Fault]:
        """Answer a request of another Gateway, whose members were replaced.

        See :mod:`app.graph.rolling_update`.

        Raises:
            OtherSetError: the members of this one's model set are not there either.

        """
        return await self._through_the_graph(handed_over(*fields))

    async def _through_the_graph(self, request: ClassifyRequest) -> list[Classified | Fault]:
        timeline = request.timeline
        with timeline.measure() as decoding:
            left_s = request.left_s
            decoded: Decoded = await call(
                self._decoder, "decode", request.files, left_s, left_s=left_s
            )
        check_same_model_set(decoded.model_set_fingerprint, self._fingerprint)
        groups: list[MemberResults] = []
        if len(decoded.images):
            members = self._cascade if self._cascade and request.may_skip else self._members
            groups = await members.ask(decoded.images, request)
        with timeline.measure("combine") as timeline.combining:
            combined = [await self._combine(group, request) for group in groups]
        good: dict[int, Classified] = {}
        for group, answers in zip(groups, combined, strict=True):
            for row, (place, one) in enumerate(zip(group.images, answers, strict=True)):
                timings = timeline.of_image(
                    row, decoding, decoded.decode_ms[place], group.call_times, group.answers
                )
                good[place] = classified(
                    one,
                    self._model_set.name,
                    group.skipped,
                    group.missing,
                    request.request_id,
                    timings,
                )
        if not request.is_probe:
            record_answers(list(good.values()), [one.entropy for row in combined for one in row])
        in_order = iter([good[place] for place in range(len(good))])
        return [decoded.faults.get(i) or next(in_order) for i in range(len(request.files))]

    async def _combine(self, group: MemberResults, request: ClassifyRequest) -> list[Combined]:
        rows = {name: answer.probabilities for name, answer in group.answers.items()}
        combined: list[Combined] = await call(
            self._combiner, "combine", rows, request.top_k, left_s=request.left_s
        )
        check_same_model_set(combined[0].model_set_fingerprint, self._fingerprint)
        return combined

    async def check_ready(self) -> None:
        """Return if the graph answers.

        Raises:
            NotReadyError: a stage does not.

        """
        await self._readiness.check()

    def served_models(self) -> ServedModels:
        """Say what is served."""
        manifest, precision = self._model_set.manifest, self.settings.precision
        return ServedModels(
            model_set=manifest.name,
            description=manifest.description,
            hint=manifest.hint,
            input_size=manifest.image.input_size,
            labels=list(self._model_set.labels),
            max_drop=manifest.max_drop,
            verified=judge(manifest, precision).status,
            members=[
                ServedMember(name=m.name, precision=precision, weight=m.weight, source=m.source)
                for m in manifest.members
            ],
            accuracy=[record.model_dump(mode="json") for record in manifest.accuracy],
            cascade_margin=self._cascade.margin if self._cascade else None,
        )
