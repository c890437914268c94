"""POST /v2/models/MODEL/infer: reads an inference request, renders its answer."""

from starlette.responses import Response
from starlette.types import Receive, Scope

from app.graph.intake import RequestOptions
from app.graph.timeline import Timeline
from app.http.classify import REFUSED, timeout_s_of
from app.http.coded_body import read_coded_body
from app.http.disconnect import DisconnectWatch
from app.http.errors import error_response
from app.http.headers import Headers
from app.http.shared_memory import is_local
from app.messages import Fault
from app.oip.answer import rendered
from app.oip.inference import Inference, ModelRequest
from app.oip.json_body import HEADER_LENGTH, parse_request
from app.oip.models import ServedModel
from app.queueing.byte_budget import Share
from app.queueing.haproxy_headers import refused_before

LENGTH = HEADER_LENGTH.encode("ascii")


class InferEndpoint:
    """Answers the requests of the route."""

    def __init__(self, inference: Inference) -> None:
        self._inference, self._watch = inference, DisconnectWatch()
        self._max_bytes = inference.service.settings.max_body_bytes

    async def answer(self, scope: Scope, receive: Receive, model: ServedModel) -> Response:
        """Return the response.

        Raises:
            TandemError: the request is refused, or failed as a whole.

        """
        timeline, headers = Timeline(), Headers(scope)
        options = RequestOptions(
            headers.request_id,
            timeout_s=timeout_s_of(headers),
            priority=headers.get(b"priority"),
            refused_before=refused_before(headers.get(REFUSED)),
        )
        with self._watch.request(receive) as watched:

            async def read(share: Share) -> ModelRequest:
                body = await read_coded_body(receive, headers, self._max_bytes, share)
                watched.begin()
                request, regions = parse_request(body, headers.get(LENGTH)), None
                if request.uses_regions:
                    memory = self._inference.shared_memory
                    regions = memory.for_caller(is_local=is_local(scope))
                return ModelRequest(model, request, regions)

            answer = await self._inference.answer(read, options, timeline)
        if isinstance(answer, Fault):
            return error_response(answer, headers.request_id, is_protocol=True)
        with timeline.encoding():
            body, num_json = rendered(answer)
        if num_json is None:
            return Response(body, media_type="application/json")
        return Response(body, 200, {HEADER_LENGTH: str(num_json)}, "application/octet-stream")
