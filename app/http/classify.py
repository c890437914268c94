"""POST /v1/classify, as an ASGI application: reads query and body, writes the answer.

It notices clients that hang up while their request is answered, and cancels the request's task.
After the body the server's ``receive`` only ends with a disconnect. A waiting task per request
would cost CPU time. So requests that take longer run ``receive`` up to its first wait, and go on
when the future that it waits for is done.
"""

import asyncio
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.answers import Fault, Results, as_json, error_answer
from app.errors import MAX_SHOWN, REFUSED_HEADER, TIMEOUT_COPY, BadParameterError, ClientGoneError
from app.graph.request import (
    CACHE_CONTROL,
    TIMEOUT_HEADER,
    Regions,
    RequestAnswers,
    RequestBody,
    RequestOptions,
    parse_timeout_s,
    parsed_regions,
)
from app.graph.service import EnsembleService
from app.http.body import FileForm, Headers, read_coded_body, read_coded_chunks
from app.http.errors import error_response, response_of
from app.telemetry.metrics import INVOCATIONS, RequestObserver
from models.errors import CorruptImageError, TandemError

VERB, PATH = "POST", "/v1/classify"
# Without HAProxy, which renames the header, Serve applies the same limit from a moment earlier and
# would answer 408 in plain text. The answer also takes time to travel.
CLIENT_TIME_SHARE = 0.9
CONTENT_TYPE = b"content-type"
CACHE, REFUSED = CACHE_CONTROL.encode("ascii"), REFUSED_HEADER.encode("ascii")
MOVED, TIMEOUT = TIMEOUT_COPY.encode("ascii"), TIMEOUT_HEADER.encode("ascii")


class ClassifyRoute:
    """The route for images, which answers with ``service``."""

    path = PATH  # read by the middleware that records requests

    def __init__(self, service: EnsembleService) -> None:
        self._service = service
        self.default_top_k = min(service.settings.default_top_k, service.num_classes)

    def takes(self, scope: Scope) -> bool:
        """Whether a request is for this route."""
        if scope["type"] != "http" or scope["method"] != VERB:
            return False
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        return path == PATH or (path == INVOCATIONS and not is_json(scope))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self
        try:
            answer = await self._answer(scope, receive)
        except TandemError as error:
            response = response_of(scope, error)
        except Exception as error:
            await response_of(scope, error)(scope, receive, send)
            raise  # so that the server logs it
        else:
            if isinstance(answer, Fault):
                response = error_response(scope, answer)
            else:
                response = Response(answer, media_type="application/json")
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> bytes | Fault:
        """Return the answer as JSON, or the fault of the body's only image."""
        observer = RequestObserver()
        headers, service = Headers(scope), self._service
        options = _options_of(scope, headers, service.settings.traffic_header)
        is_form = headers.text(CONTENT_TYPE)[:10].lower() == "multipart/"
        with WatchedRequest(receive) as watched, service.admit(options, observer) as admitted:
            async with admitted.arriving():
                most, share = service.settings.max_body_bytes, admitted.share
                if is_form:
                    form = FileForm(headers.text(CONTENT_TYPE), service.settings.max_files)
                    await read_coded_chunks(watched, headers, most, share, form.write)
                    body = RequestBody(form.files())
                else:
                    body = RequestBody([await read_coded_body(watched, headers, most, share)])
            answers = await admitted.answer(body)
        start_ms = observer.elapsed_ms()
        try:
            if is_form or (options.regions and not _are_faults(answers)):
                request_id = headers.request_id
                rows = [error_answer(a, request_id) if isinstance(a, Fault) else a for a in answers]
                return as_json(Results(results=rows, request_id=request_id))
            answer = answers[0]
            return _with_hint(answer, headers) if isinstance(answer, Fault) else as_json(answer)
        finally:
            observer.stage_ended("encode", start_ms)


def _are_faults(answers: RequestAnswers) -> bool:
    """Whether no image has an answer: the first fault is then the response's."""
    return all(isinstance(answer, Fault) for answer in answers)


def is_json(scope: Scope) -> bool:
    """Whether a request's body is JSON, by its content type."""
    kind = Headers(scope).text(CONTENT_TYPE).partition(";")[0]
    return kind.strip().lower() == "application/json"


def _with_hint(fault: Fault, headers: Headers) -> Fault:
    """Add the reason if ``curl -d @photo.jpg``, which drops line ends, may have cut a file."""
    is_of_curl = headers.text(b"content-type") == "application/x-www-form-urlencoded"
    if fault.code != CorruptImageError.code or not is_of_curl:
        return fault
    return replace(fault, message=f"{fault.message} With curl: --data-binary, since -d alters it.")


def _options_of(scope: Scope, headers: Headers, traffic_header: str | None) -> RequestOptions:
    """Return the options in the query and the headers."""
    if not (text := scope["query_string"]):
        return request_options(headers, traffic_header)
    query = dict(parse_qsl(text.decode("latin-1"), keep_blank_values=True))  # the last of repeated
    return request_options(
        headers,
        traffic_header,
        top_k=_whole("top_k", query["top_k"]) if "top_k" in query else None,
        threshold=_number("threshold", query["threshold"]) if "threshold" in query else None,
        model_set=query.get("model_set"),
        plan=query.get("plan"),
        has_set=_truth("answer_set", query["answer_set"]) if "answer_set" in query else False,
        regions=_regions(query["regions"]) if "regions" in query else (),
        embedding=query.get("embedding"),
    )


def request_options(
    headers: Headers, traffic_header: str | None, **elsewhere: Any
) -> RequestOptions:
    """Return the options in a request's headers, with those that its interface has elsewhere.

    ``traffic_header`` is the header by which a version is chosen; None: by image. ``elsewhere``
    are further fields of the options.
    """
    text = headers.get(MOVED)
    if text is None:
        text = headers.get(TIMEOUT)
    return RequestOptions(
        headers.request_id,
        timeout_s=None if text is None else CLIENT_TIME_SHARE * parse_timeout_s(text),
        priority=headers.get(b"priority"),
        refused_before=headers.get(REFUSED),
        cache_control=headers.joined(CACHE),
        traffic_key=headers.get(traffic_header.encode("ascii")) if traffic_header else None,
        caller=headers.caller,
        **elsewhere,
    )


def _whole(name: str, text: str) -> int:
    digits = text.strip()
    if not (digits.removeprefix("-").isascii() and digits.removeprefix("-").isdigit()):
        raise BadParameterError(f"{name} is {text[:MAX_SHOWN]!r}; give a whole number; see /docs")
    return int(digits[:MAX_SHOWN])  # longer than any number of classes


def _truth(name: str, text: str) -> bool:
    if text in ("true", "false"):
        return text == "true"
    raise BadParameterError(f"{name} is {text[:MAX_SHOWN]!r}; give true or false; see /docs")


def _regions(text: str) -> Regions:
    try:
        sent = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadParameterError(
            f"regions is {text[:MAX_SHOWN]!r}, which is no JSON; give [[x, y, width, height], ...]"
        ) from error
    return parsed_regions(sent)


def _number(name: str, text: str) -> float:
    if text.isascii() and "_" not in text:  # float would take 0.5_0, and digits of other scripts
        with suppress(ValueError):
            return float(text)
    raise BadParameterError(f"{name} is {text[:MAX_SHOWN]!r}; give a number; see /docs")


WATCHED_AFTER_S = 0.05  # from the body on; few requests live as long


class WatchedRequest:
    """A request whose block is cancelled if its client hangs up after the body was read.

    The body must be read by calling this object in place of ASGI's ``receive``.

    Raises:
        ClientGoneError: in place of the cancellation, at the end of the block.
    """

    __slots__ = ("_is_cancelled", "_later", "_receive", "_task", "_waiting")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[object] | None = None
        self._later: asyncio.TimerHandle | None = None
        self._waiting: Generator[Any, None, Message] | None = None
        self._is_cancelled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._later is not None:
            self._later.cancel()
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None
        if not self._is_cancelled or self._task is None:
            return
        # A cancellation by others must be passed on.
        if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGoneError("the client hung up before its answer was there") from error

    async def __call__(self) -> Message:
        """Receive the next message; after the body the server only sends a disconnect."""
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._task = asyncio.current_task()
            self._later = asyncio.get_running_loop().call_later(WATCHED_AFTER_S, self._watch)
        return message

    def _watch(self) -> None:
        self._waiting = self._receive().__await__()
        self._go_on()

    def _go_on(self, _: object = None) -> None:
        """Run ``receive`` up to its next wait; cancel the task if it ended with a disconnect."""
        if self._waiting is None:  # the block has ended
            return
        try:
            future = next(self._waiting)
        except StopIteration as end:
            self._waiting = None
            if end.value["type"] == "http.disconnect" and self._task is not None:
                self._is_cancelled = True
                self._task.cancel()
            return
        if future is None:  # a bare yield: go on in the loop's next turn
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            future._asyncio_future_blocking = False  # as a task does with a future that it got
            future.add_done_callback(self._go_on)
