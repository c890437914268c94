"""POST /v1/classify: reads parameters and body, renders the answer."""

from starlette.types import Receive

from app.caching.response_cache import CACHE_CONTROL
from app.graph.intake import RequestBody, RequestOptions
from app.graph.parameters import TIMEOUT_HEADER, parse_timeout_s
from app.graph.request import RequestAnswers
from app.graph.service import EnsembleService
from app.graph.timeline import Timeline
from app.http.body import read_body, read_files
from app.http.disconnect import DisconnectWatch
from app.http.headers import Headers
from app.messages import Fault
from app.queueing.byte_budget import Share
from app.queueing.haproxy_headers import REFUSED_HEADER, TIMEOUT_COPY, refused_before
from app.responses import Classified, Results, as_json, error_answer

# Without HAProxy, which moves it, Serve counts the same header from a moment earlier and would
# answer 408 in plain text: be first. And the answer has some way to go.
CLIENT_TIME_SHARE = 0.9
REFUSED, MOVED = REFUSED_HEADER.encode("ascii"), TIMEOUT_COPY.encode("ascii")
CACHE = CACHE_CONTROL.encode("ascii")


class ClassifyEndpoint:
    """Answers the requests of the route with ``service``, however they were routed."""

    def __init__(self, service: EnsembleService) -> None:
        self._service = service
        self.default_top_k = min(service.settings.default_top_k, service.num_classes)
        self._has_cache = service.settings.cache != "none"
        self._watch = DisconnectWatch()

    async def answer(
        self, headers: Headers, receive: Receive, top_k: int, threshold: float | None = None
    ) -> bytes | Fault:
        """Return the answer as JSON, or why the one image of the body has none.

        Raises:
            TandemError: for the request as a whole.

        """
        timeline = Timeline()
        content_type = headers.text(b"content-type")
        is_form = content_type[:10].lower() == "multipart/"
        request_id = headers.request_id
        options = RequestOptions(
            request_id,
            top_k,
            timeout_s_of(headers),
            headers.get(b"priority"),
            refused_before(headers.get(REFUSED)),
            headers.joined(CACHE) if self._has_cache else None,
            threshold,
        )
        length, settings = headers.text(b"content-length"), self._service.settings
        most = settings.max_body_bytes

        with self._watch.request(receive) as watched:

            async def read(share: Share) -> RequestBody:
                if is_form:
                    files = await read_files(
                        receive, length, content_type, most, settings.max_files, share
                    )
                else:
                    files = [await read_body(receive, length, most, share)]
                watched.begin()
                return RequestBody(files)

            answers = await self._service.answer(read, options, timeline)
        with timeline.encoding():
            return _form_of(answers, request_id) if is_form else _image_of(answers[0])


def _form_of(answers: RequestAnswers, request_id: str) -> bytes:
    rows = [error_answer(a, request_id) if isinstance(a, Fault) else a for a in answers]
    return as_json(Results(results=rows, request_id=request_id))


def _image_of(answer: Classified | Fault) -> bytes | Fault:
    return answer if isinstance(answer, Fault) else as_json(answer)


def timeout_s_of(headers: Headers) -> float | None:
    """Return the time that the client gives its request, in seconds; None if it does not."""
    given = headers.get(MOVED)
    if given is None:
        given = headers.get(TIMEOUT_HEADER.encode("ascii"))
    return None if given is None else CLIENT_TIME_SHARE * parse_timeout_s(given)
