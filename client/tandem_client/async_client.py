"""The client for asyncio."""

import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import overload

import httpx

from tandem_client.addresses import checked_url
from tandem_client.answers import Classification, Result
from tandem_client.async_calls import AsyncCalls
from tandem_client.client import DEFAULT_URL
from tandem_client.images import Channels, Image
from tandem_client.many import Stream
from tandem_client.options import CallOptions, Options
from tandem_client.retries import RetryPolicy
from tandem_client.tls import Tls


class AsyncClient:
    """Calls a service from an event loop; :class:`tandem_client.Client` explains the arguments.

    Connections are kept between calls. ``aclose``, or the end of an ``async with`` block, closes
    them.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        retry: RetryPolicy | None = None,
        tls: Tls | ssl.SSLContext | None = None,
        allow_degraded: bool = True,
        max_connections: int = 100,
        transport: httpx.MockTransport | None = None,
    ) -> None:
        self._options = options = Options(
            checked_url(url),
            api_key,
            timeout,
            retry or RetryPolicy(),
            tls,
            allow_degraded,
            max_connections,
            transport,
        )
        self._calls = AsyncCalls(options, options.tls_context())

    def __repr__(self) -> str:
        return f"AsyncClient({self._options.shown_url!r})"

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._calls.aclose()

    @overload
    async def classify(  # type: ignore[overload-overlap]  # a str is a sequence of str too
        self,
        image: Image,
        *,
        top_k: int | None = None,
        channels: Channels | None = None,
        timeout: float | None = None,
        priority: int | None = None,
        threshold: float | None = None,
        model_set: str | None = None,
    ) -> Classification: ...

    @overload
    async def classify(
        self,
        image: Sequence[Image],
        *,
        top_k: int | None = None,
        channels: Channels | None = None,
        timeout: float | None = None,
        priority: int | None = None,
        threshold: float | None = None,
        model_set: str | None = None,
    ) -> list[Result]: ...

    async def classify(
        self,
        image: Image | Sequence[Image],
        *,
        top_k: int | None = None,
        channels: Channels | None = None,
        timeout: float | None = None,
        priority: int | None = None,
        threshold: float | None = None,
        model_set: str | None = None,
    ) -> Classification | list[Result]:
        """Classify an image, or several in one request: :meth:`tandem_client.Client.classify`.

        Files are read, and arrays packed, on another thread.

        Raises:
            TandemError: there is no answer; see :mod:`tandem_client.errors`.

        """
        options = CallOptions(top_k, channels, timeout, priority, threshold, model_set)
        return await self._calls.classify(image, options)

    def classify_many(
        self,
        images: Iterable[Image],
        *,
        concurrency: int = 16,
        ordered: bool = True,
        raise_errors: bool = False,
        top_k: int | None = None,
        channels: Channels | None = None,
        timeout: float | None = None,
        priority: int | None = None,
        threshold: float | None = None,
        model_set: str | None = None,
    ) -> AsyncIterator[Result]:
        """Classify any number of images: :meth:`tandem_client.Client.classify_many`.

        ``images`` is iterated on the event loop, and must not block it. Calls under way are
        cancelled when the iterator is closed (``contextlib.aclosing``), or when the iterating task
        is cancelled.

        Raises:
            TandemError: with ``raise_errors``.

        """
        if concurrency > self._options.max_connections:
            raise ValueError(
                f"concurrency is {concurrency}, max_connections {self._options.max_connections}: "
                "give the client as many connections"
            )
        options = CallOptions(top_k, channels, timeout, priority, threshold, model_set)
        return Stream(options, concurrency, ordered, raise_errors).on_loop(images, self._calls)
