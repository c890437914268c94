"""The blocking client."""

import ssl
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import overload

import httpx

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
    """Asks a service, one call at a time; any number of threads may share it.

    Connections are kept between calls; ``close``, or a ``with`` block, ends them, and the thread on
    which the requests are.

    Args:
        url: where the service is, with ``http://`` or ``https://``.
        api_key: the key of a service that wants one.
        timeout: seconds for a call with all its attempts; the service hears of it too.
        retry: how often and after what a call is tried again.
        tls: files for ``https://``, or a context of one's own.
        allow_degraded: whether answers of fewer members than were asked are answers; else they are
            raised as :class:`Degraded`.
        max_connections: that are open at a time.
        transport: answers in place of a network, for tests.

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
            url.rstrip("/"),
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
        weakref.finalize(self, self._thread.close)  # of a client that nobody closed

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
        """End the connections."""
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
    ) -> Classification | list[Result]:
        """Classify an image, or several in one request.

        Args:
            image: a path, a file's bytes (JPEG, PNG, WebP), or pixels, (H, W, 3) uint8; or a
                sequence of them, as many as the service takes in one request (64).
            top_k: classes in the answer; the service's default if None.
            channels: "rgb" or "bgr", the order of an array's channels; not for files.
            timeout: seconds for this call, in place of the client's.
            priority: urgency of RFC 9218, 0 (first) to 7; from 4 on the image waits behind others.
            threshold: of a multi-label set, the least score of a label in the answer; the set's
                if None.

        Returns:
            The answer; for a sequence a :class:`Result` for each image, in order: one bad image
            has its error there, and spoils no other.

        Raises:
            TandemError: there is no answer; see :mod:`tandem_client.errors`.

        """
        options = CallOptions(top_k, channels, timeout, priority, threshold)
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
    ) -> Iterator[Result]:
        """Classify any number of images, each in a request of its own, some at a time.

        Images are taken from ``images`` and read as places become free, never all at once; at most
        ``4 * concurrency`` answers wait for whoever iterates. The requests run on one thread, which
        ends with the iteration, however that ends.

        Args:
            images: see :meth:`classify`.
            concurrency: requests under way at a time.
            ordered: whether results come in the images' order, or as they are answered.
            raise_errors: whether the first image without an answer ends it all; else each error is
                in its image's :class:`Result`.
            top_k: see :meth:`classify`, like the others; ``timeout`` is of each image.
            channels: see :meth:`classify`.
            timeout: see :meth:`classify`.
            priority: see :meth:`classify`.
            threshold: see :meth:`classify`.

        Raises:
            TandemError: with ``raise_errors``.

        """
        options = CallOptions(top_k, channels, timeout, priority, threshold)
        stream = Stream(options, concurrency, ordered, raise_errors)
        return stream.blocking(images, self._options, self._context)
