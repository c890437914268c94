"""The blocking client."""

import ssl
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import overload

import httpx

from tandem_client.addresses import checked_url
from tandem_client.answers import Classification, Result
from tandem_client.async_calls import AsyncCalls
from tandem_client.exchange import answer_of
from tandem_client.images import Channels, Image
from tandem_client.loop_thread import LoopThread
from tandem_client.many import Stream
from tandem_client.options import Call, CallOptions, Options
from tandem_client.retries import RetryPolicy
from tandem_client.tls import Tls

DEFAULT_URL = "http://127.0.0.1:8000"


class Client:
    """Calls a service; any number of threads may share it.

    Connections are kept between calls. ``close``, or the end of a ``with`` block, closes them and
    ends the thread that sends the requests.

    Args:
        url: of the service, with ``http://`` or ``https://``.
        api_key: for a service that requires one.
        timeout: seconds for a call with all its attempts; also sent to the service.
        retry: how often, and after which errors, a call is repeated.
        tls: files for ``https://``, or your own context.
        allow_degraded: whether to return answers of fewer members than were asked; otherwise they
            raise :class:`Degraded`.
        max_connections: the limit of open connections.
        transport: replaces the network, for tests.

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
        self._context = options.tls_context()
        self._calls = AsyncCalls(options, self._context)
        self._thread = LoopThread(self._calls)
        weakref.finalize(self, self._thread.close)  # for a client that is never closed

    def __repr__(self) -> str:
        return f"Client({self._options.shown_url!r})"

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._thread.close()

    @overload
    def classify(  # type: ignore[overload-overlap]  # a str is a sequence of str too
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
    def classify(
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

    def classify(
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
        """Classify an image, or several in one request.

        Args:
            image: a path, a file's bytes (JPEG, PNG, WebP), or pixels, (H, W, 3) uint8; or a
                sequence of them, up to the service's limit per request (64).
            top_k: classes in the answer; None: the service's default.
            channels: "rgb" or "bgr", the order of an array's channels; not for files.
            timeout: seconds for this call, in place of the client's.
            priority: urgency of RFC 9218, 0 (first) to 7; from 4 on the image waits behind others.
            threshold: for a multi-label set, the lowest score of a label in the answer; None: the
                set's.
            model_set: for a service with several sets, the set's name; None: the first.

        Returns:
            The answer; for a sequence a :class:`Result` for each image, in order. A bad image has
                its error there, and does not affect the others.

        Raises:
            TandemError: there is no answer; see :mod:`tandem_client.errors`.

        """
        options = CallOptions(top_k, channels, timeout, priority, threshold, model_set)
        call = Call.of(image, options)
        said = self._thread.run(self._calls.ask, call)
        return answer_of(call, said, allow_degraded=self._options.allow_degraded)

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
    ) -> Iterator[Result]:
        """Classify any number of images, each in its own request, several at a time.

        Images are taken from ``images`` and read when places become free; at most ``4 *
        concurrency`` answers wait for the caller. The requests run on a thread that ends with the
        iteration.

        Args:
            images: see :meth:`classify`.
            concurrency: requests under way at a time.
            ordered: whether results come in the images' order, or as they are answered.
            raise_errors: whether the first error ends the iteration; otherwise each error is in its
                image's :class:`Result`.
            top_k: see :meth:`classify`, as for the others; ``timeout`` applies to each image.
            channels: see :meth:`classify`.
            timeout: see :meth:`classify`.
            priority: see :meth:`classify`.
            threshold: see :meth:`classify`.
            model_set: see :meth:`classify`.

        Raises:
            TandemError: with ``raise_errors``.

        """
        options = CallOptions(top_k, channels, timeout, priority, threshold, model_set)
        stream = Stream(options, concurrency, ordered, raise_errors)
        return stream.blocking(images, self._options, self._context)
