"""Calls on an event loop: attempts, waits, and the deadline that ends them."""

import asyncio
import ssl
from collections.abc import Callable, Sequence

import httpx

from tandem_client.addresses import is_loopback
from tandem_client.answers import Classification, Result
from tandem_client.errors import TandemError
from tandem_client.exchange import Outcome, answer_of, build, checked, failed, failure, outcomes
from tandem_client.images import Image, path_of, takes_long
from tandem_client.options import Call, CallOptions, Options
from tandem_client.retries import Attempts


class AsyncCalls:
    """Sends calls to a service, over its own connections."""

    def __init__(self, options: Options, context: ssl.SSLContext) -> None:
        self._options = options
        self._http = httpx.AsyncClient(
            headers=options.headers,
            verify=context,
            limits=options.limits,
            transport=options.transport,
            trust_env=not is_loopback(options.url),
        )
        self._now: Callable[[], float] | None = None  # the running loop's clock
        self._sleep = asyncio.sleep

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def classify(
        self, image: Image | Sequence[Image], options: CallOptions
    ) -> Classification | list[Result]:
        """Classify an image, or several in one request."""
        call = await _call_of(image, options)
        said = await self.ask(call)
        return answer_of(call, said, allow_degraded=self._options.allow_degraded)

    async def result(self, index: int, image: Image, options: CallOptions) -> Result:
        """Classify one of many images; return its error instead of raising it."""
        try:
            (outcome,) = await self.ask(await _call_of(image, options))
            answer = checked(outcome, allow_degraded=self._options.allow_degraded)
        except TandemError as error:
            return failed(index, image, error)
        return Result(index, path_of(image), answer)

    async def ask(self, call: Call) -> list[Outcome]:
        """Return the service's outcome for each file, retrying as the options allow.

        Raises:
            TandemError: there is no answer; see :mod:`tandem_client.errors`.

        """
        if not call.files:
            return []
        timeout_s = call.options.timeout_s or self._options.timeout_s
        now = self._now or asyncio.get_running_loop().time
        attempts = Attempts(self._options.retry, timeout_s, now)
        while True:
            left_s = attempts.begin()
            try:
                return await asyncio.wait_for(self._attempt(call, attempts, left_s), left_s)
            except asyncio.TimeoutError:
                raise attempts.exceeded() from None
            except TandemError as error:
                wait_s = attempts.wait_s(error)
            await self._sleep(wait_s)

    async def _attempt(self, call: Call, attempts: Attempts, left_s: float) -> list[Outcome]:
        request = build(self._http, self._options, call, left_s)
        try:
            response = await self._http.send(request)
        except (httpx.HTTPError, ssl.SSLError) as error:  # httpx passes on a TLS alert in an answer
            raise failure(self._options, attempts, error) from error
        return outcomes(self._options, call, response, response.content)


async def _call_of(image: Image | Sequence[Image], options: CallOptions) -> Call:
    if takes_long(image):
        return await asyncio.to_thread(Call.of, image, options)
    return Call.of(image, options)
