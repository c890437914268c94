"""POST /v2/models/MODEL/infer: reads an inference request and renders its answer."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope

from app.graph.observer import RequestObserver
from app.http.body import read_coded_body
from app.http.classify import request_options
from app.http.disconnect import WatchedRequest
from app.http.errors import error_response
from app.http.headers import Headers
from app.http.shared_memory import is_local
from app.messages import Fault
from app.oip.answer import InferAnswer, rendered
from app.oip.inference import Inference, ModelRequest
from app.oip.json_body import HEADER_LENGTH, parse_request
from app.oip.models import ServedModel
from app.oip.request import InferRequest
from app.oip.shared_memory import for_caller

LENGTH = HEADER_LENGTH.encode("ascii")
Parse = Callable[[bytes, str | None], InferRequest]
Render = Callable[[InferAnswer], tuple[bytes, int | None]]


class InferEndpoint:
    """Answers the route's requests, or another protocol's with its own ``parse`` and ``render``.

    ``render`` returns the body, and the length of its JSON if tensors follow it.
    """

    def __init__(
        self, inference: Inference, parse: Parse = parse_request, render: Render = rendered
    ) -> None:
        self._inference, self._parse, self._render = inference, parse, render

    async def answer(self, scope: Scope, receive: Receive, model: ServedModel) -> Response:
        """Return the response; raise :class:`TandemError` if the request fails as a whole."""
        observer, headers, inference = RequestObserver(), Headers(scope), self._inference
        traffic_header = inference.service.settings.traffic_header
        options = request_options(headers, traffic_header, model_set=model.model_set)
        with (
            WatchedRequest(receive) as watched,
            inference.admit(options, observer) as admitted,
        ):
            async with admitted.arriving():
                most = inference.service.settings.max_body_bytes
                body = await read_coded_body(watched, headers, most, admitted.share)
                request, regions = self._parse(body, headers.get(LENGTH)), None
                if request.uses_regions:
                    regions = for_caller(inference.regions, is_local=is_local(scope))
                await admitted.ask(ModelRequest(model, request, regions))
            answer = await admitted.answer()
        if isinstance(answer, Fault):
            return error_response(scope, answer)
        start_ms = observer.elapsed_ms()
        content, num_json = self._render(answer)
        observer.stage_ended("encode", start_ms)
        if num_json is None:
            return Response(content, media_type="application/json")
        return Response(content, 200, {HEADER_LENGTH: str(num_json)}, "application/octet-stream")
