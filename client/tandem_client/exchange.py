"""An HTTP request and its answer (``POST /v1/classify``), for both clients."""

import json
import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any, NoReturn

import httpx

from tandem_client.answers import Classification, Result, classification_of
from tandem_client.errors import BadAnswer, Reason, TandemError, Unreachable, error_of, has_error_of
from tandem_client.images import Image, path_of
from tandem_client.options import Call, CallOptions, Options
from tandem_client.retries import Attempts, retry_after_s, told_s

CONNECT_S = 5.0  # longer than any handshake; then another attempt may reach another host
Outcome = Classification | TandemError


def build(client: httpx.AsyncClient, options: Options, call: Call, left_s: float) -> httpx.Request:
    """Return the request for an attempt that may take ``left_s``."""
    headers = _headers(call.options) | {"x-request-timeout-seconds": told_s(left_s)}
    body: dict[str, Any] = {"content": call.files[0]}
    if call.is_form:
        files = [
            ("files", (str(number), data, "application/octet-stream"))
            for number, data in enumerate(call.files)
        ]
        body = {"files": files}
    return client.build_request(
        "POST",
        f"{options.url}/v1/classify",
        params=call.options.query,
        headers=headers,
        timeout=httpx.Timeout(left_s, connect=min(left_s, CONNECT_S)),
        **body,
    )


def _headers(options: CallOptions) -> dict[str, str]:
    return {} if options.priority is None else {"priority": f"u={options.priority}"}


def outcomes(options: Options, call: Call, response: httpx.Response, body: bytes) -> list[Outcome]:
    """Return the outcome of each file, in order.

    Raises:
        TandemError: the request failed as a whole, or the answer is not Tandem's.

    """
    status = response.status_code
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        raise error_of(answer["error"], status, retry_after_s(response.headers.get("retry-after")))
    try:
        if status == httpx.codes.OK and isinstance(answer, dict):
            rows = answer["results"] if call.is_form else [answer]
            if len(rows) == len(call.files):
                return [outcome_of(row) for row in rows]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(_not_ours(options, status), "bad_answer", status=status) from error
    _refuse(options, response)


def outcome_of(row: Mapping[str, Any]) -> Outcome:
    """Return an image's answer, or its error."""
    return error_of(row["error"]) if "error" in row else classification_of(row)


def _refuse(options: Options, response: httpx.Response) -> NoReturn:
    """Raise for an answer in a foreign form: a load balancer's, or another service's."""
    status, message = response.status_code, _not_ours(options, response.status_code)
    if has_error_of(status):
        fields = {"code": f"http_{status}", "message": message}
        raise error_of(fields, status, retry_after_s(response.headers.get("retry-after")))
    raise BadAnswer(message, "bad_answer", status=status)


def failure(
    options: Options, attempts: Attempts, error: httpx.HTTPError | ssl.SSLError
) -> TandemError:
    """Return the error for a request without an answer."""
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return attempts.exceeded()
    return Unreachable(f"no answer from {options.shown_url} ({cause_of(error)})", _reason(error))


def _reason(error: httpx.HTTPError | ssl.SSLError) -> Reason | None:
    """Return why the request may be retried; None for a bad certificate, which stays bad."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return None
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "refused"
    ended = httpx.NetworkError | httpx.RemoteProtocolError
    return "reset" if isinstance(error, ended) else None


def cause_of(error: BaseException) -> str:
    """Return why a connection failed in the system's words, such as "Connection refused"."""
    text = str(error) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError | socket.gaierror):
            text = cause.strerror or text
        elif isinstance(cause, OSError) and cause.errno:
            text = os.strerror(cause.errno)  # asyncio's own text names its function
        several = getattr(cause, "exceptions", ())  # a name with several addresses
        cause = cause.__cause__ or (several[0] if several else cause.__context__)
    return text


def _not_ours(options: Options, status: int) -> str:
    return f"{options.shown_url} answered {status}, but not as Tandem does"


def answer_of(
    call: Call, said: list[Outcome], *, allow_degraded: bool
) -> Classification | list[Result]:
    """Return the caller's result: the answer, or a result for each image of a form.

    Raises:
        TandemError: the only image has no answer.

    """
    if not call.is_form:
        return checked(said[0], allow_degraded=allow_degraded)
    results, of_files = [], iter(said)
    for index, image in enumerate(call.images):
        try:
            outcome = call.errors.get(index) or next(of_files)
            answer = checked(outcome, allow_degraded=allow_degraded)
            results.append(Result(index, path_of(image), answer))
        except TandemError as error:
            results.append(failed(index, image, error))
    return results


def checked(outcome: Outcome, *, allow_degraded: bool) -> Classification:
    """Return an image's answer, or raise its error."""
    if isinstance(outcome, TandemError):
        raise outcome
    if not allow_degraded:
        outcome.check_whole()
    return outcome


def failed(index: int, image: Image, error: TandemError) -> Result:
    """Return the result for an image without an answer.

    The error loses its traceback, whose frames would keep the image in memory, for thousands of
    images.
    """
    error.__cause__ = error.__context__ = None
    return Result(index, path_of(image), error=error.with_traceback(None))
