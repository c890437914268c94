"""One HTTP request and its answer (``POST /v1/classify``), the same for both clients."""

import json
import ssl
from collections.abc import Mapping
from typing import Any, NoReturn

import httpx

from tandem_client.answers import Classification, Result, classification_of
from tandem_client.errors import BadAnswer, Reason, TandemError, Unreachable, error_of, has_error_of
from tandem_client.images import Image, path_of
from tandem_client.options import Call, CallOptions, Options
from tandem_client.retries import Attempts, retry_after_s, told_s

CONNECT_S = 5.0  # longer than any handshake; then another attempt may meet a living host
Outcome = Classification | TandemError


def build(client: httpx.AsyncClient, options: Options, call: Call, left_s: float) -> httpx.Request:
    """Return the request for an attempt that may take ``left_s``.

    Raises:
        Unreachable: the address is none.

    """
    headers = _headers(call.options) | {"x-request-timeout-seconds": told_s(left_s)}
    body: dict[str, Any] = {"content": call.files[0]}
    if call.is_form:
        files = [
            ("files", (str(number), data, "application/octet-stream"))
            for number, data in enumerate(call.files)
        ]
        body = {"files": files}
    try:
        return client.build_request(
            "POST",
            f"{options.url}/v1/classify",
            params=call.options.query,
            headers=headers,
            timeout=httpx.Timeout(left_s, connect=min(left_s, CONNECT_S)),
            **body,
        )
    except httpx.InvalidURL as error:
        raise Unreachable(_no_answer(options, error)) from error


def _headers(options: CallOptions) -> dict[str, str]:
    return {} if options.priority is None else {"priority": f"u={options.priority}"}


def outcomes(options: Options, call: Call, response: httpx.Response, body: bytes) -> list[Outcome]:
    """Return what was said of each image, in order.

    Raises:
        TandemError: the request failed as a whole, or the answer is not Tandem's.

    """
    status = response.status_code
    try:
        told = json.loads(body)
    except ValueError:
        told = None
    if isinstance(told, dict) and isinstance(told.get("error"), dict):
        raise error_of(told["error"], status, retry_after_s(response.headers.get("retry-after")))
    try:
        if status == httpx.codes.OK and isinstance(told, dict):
            rows = told["results"] if call.is_form else [told]
            if len(rows) == len(call.files):
                return [outcome_of(row) for row in rows]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(_not_ours(options, status), "bad_answer", status=status) from error
    _refuse(options, response)


def outcome_of(row: Mapping[str, Any]) -> Outcome:
    """Return one image's answer, or its error."""
    return error_of(row["error"]) if "error" in row else classification_of(row)


def _refuse(options: Options, response: httpx.Response) -> NoReturn:
    """Raise for an answer in another form than ours: a balancer's, or another service's."""
    status, message = response.status_code, _not_ours(options, response.status_code)
    if has_error_of(status):
        told = {"code": f"http_{status}", "message": message}
        raise error_of(told, status, retry_after_s(response.headers.get("retry-after")))
    raise BadAnswer(message, "bad_answer", status=status)


def failure(options: Options, attempts: Attempts, error: httpx.HTTPError) -> TandemError:
    """Return the error for a request that had no answer."""
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return attempts.exceeded()
    return Unreachable(_no_answer(options, error), _reason(error))


def _reason(error: httpx.HTTPError) -> Reason | None:
    """Return why it may be tried again; a certificate is the same the next time."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return None
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "refused"
    ended = httpx.NetworkError | httpx.RemoteProtocolError
    return "reset" if isinstance(error, ended) else None


def _no_answer(options: Options, error: Exception) -> str:
    return f"no answer from {options.shown_url} ({type(error).__name__})"


def _not_ours(options: Options, status: int) -> str:
    return f"{options.shown_url} answered {status}, but not as Tandem does"


def answer_of(
    call: Call, said: list[Outcome], *, allow_degraded: bool
) -> Classification | list[Result]:
    """Return what a caller gets: the answer, or a result for each image of a form.

    Raises:
        TandemError: the one image has none.

    """
    if not call.is_form:
        return checked(said[0], allow_degraded=allow_degraded)
    results = []
    for index, (image, outcome) in enumerate(zip(call.images, said, strict=True)):
        try:
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

    The error is parted from where it was raised: those frames hold the image, of thousands.
    """
    error.__cause__ = error.__context__ = None
    return Result(index, path_of(image), error=error.with_traceback(None))
