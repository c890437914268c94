"""The blocking client, the client for asyncio, and calls of many images."""

import asyncio
import concurrent.futures
import ssl
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

import httpx

from tandem_client.answers import (
    Classification,
    Erased,
    Feedback,
    Outcome,
    Result,
    TandemError,
    Taught,
    TaughtFigures,
)
from tandem_client.exchange import (
    AsyncCalls,
    Options,
    RetryPolicy,
    ServiceClient,
    Tls,
    answer_of,
    checked_url,
    result_of,
)
from tandem_client.images import Asked, Call, CallArguments, CallOptions, Channels, Image, Regions

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # typing has them from Python 3.11 on

T = TypeVar("T")
Images: TypeAlias = Image | Sequence[Image]
DEFAULT_URL = "http://127.0.0.1:8000"
# Started images and unconsumed results for each request under way: later images need not wait for a
# slow one, and memory stays bounded.
AHEAD = 4
# Ctrl-C just before a thread starts to wait is noticed only after the wait.
NOTICED_WITHIN_S = 0.5


class BlockingClient(ServiceClient, ABC):
    """A client whose calls wait for their answers: a subclass has ``close`` and ``_ask``."""

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    @abstractmethod
    def _ask(self, call: Call) -> list[Outcome]:
        """Return the service's outcome for each file, retrying as the options allow."""

    @abstractmethod
    def _shorter(self, options: CallOptions) -> int | None:
        """Return the shorter side of pictures that are shrunk, px; None: nothing is."""

    @overload
    def classify(  # type: ignore[overload-overlap]  # a str is a sequence of str too
        self, image: Image, **options: "Unpack[CallArguments]"
    ) -> Classification: ...

    @overload
    def classify(
        self, image: Sequence[Image], **options: "Unpack[CallArguments]"
    ) -> list[Result]: ...

    @overload
    def classify(
        self, image: Image, *, regions: Regions, **options: "Unpack[CallArguments]"
    ) -> list[Result]: ...

    def classify(
        self, image: Images, *, regions: Regions | None = None, **options: "Unpack[CallArguments]"
    ) -> Classification | list[Result]:
        """Classify an image, or several in one request.

        Args:
            image: a path, a file's bytes (JPEG, PNG, WebP), or pixels, (H, W, 3) uint8; or a
                sequence of them, up to the service's limit per request (64).
            regions: parts of the only image as it is shown, at most 64: (x, y, width, height) in
                pixels, or in shares of its sides if all four are at most 1.
            options: see :class:`tandem_client.images.CallArguments`.

        Returns:
            The answer; for a sequence, or regions, a :class:`Result` for each, in order. A bad one
                has its error there, and does not affect the others.

        Raises:
            TandemError: there is no answer; see :mod:`tandem_client.answers`.
        """
        wanted = CallOptions(regions=regions, **options)
        call = Call.of(image, wanted, self._shorter(wanted))
        return answer_of(call, self._ask(call), self._options)


class HttpClient(ServiceClient):
    """The options of :class:`Client`, which explains them, and of :class:`AsyncClient`."""

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
        url, retry = checked_url(url), retry or RetryPolicy()
        self._options = Options(
            url, api_key, timeout, retry, tls, allow_degraded, max_connections, transport
        )
        self._context = self._options.tls_context()
        self._calls = AsyncCalls(self._options, self._context)
        self._thread = LoopThread(self._calls)  # starts with a blocking client's first call
        weakref.finalize(self, self._thread.close)  # for a client that is never closed


class Client(HttpClient, BlockingClient):
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

    def close(self) -> None:
        """Close the connections."""
        self._thread.close()

    def _ask(self, call: Call) -> list[Outcome]:
        return self._thread.run(self._calls.ask, call)

    def _shorter(self, options: CallOptions) -> int | None:
        return self._thread.run(self._calls.shorter, options) if options.shrink else None

    def classify_many(
        self,
        images: Iterable[Image],
        *,
        concurrency: int = 16,
        ordered: bool = True,
        raise_errors: bool = False,
        **options: "Unpack[CallArguments]",
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
            options: see :meth:`classify`; ``timeout`` applies to each image.

        Raises:
            TandemError: with ``raise_errors``.
        """
        stream = Stream(CallOptions(**options), concurrency, ordered, raise_errors)
        return stream.blocking(images, self._calls)

    def teach(
        self,
        image: Image,
        label: str | int,
        *,
        channels: Channels | None = None,
        model_set: str | None = None,
    ) -> Taught:
        """Have the service keep a photograph with its label, for ``tandem learn --corrections``.

        ``label`` is a label, id or number of a class, or "none" for a photograph of none of them.
        """
        return self._send(Asked.teach(image, label, channels, model_set))

    def taught(self) -> TaughtFigures:
        """Return how many photographs of each label the answering node keeps."""
        return self._send(Asked(TaughtFigures, "GET", "/v1/teach"))

    def report(self, request_id: str, label: str | int, *, image: int | None = None) -> Feedback:
        """Report the right label of an answer, or of the ``image``-th, from 0, of a request."""
        return self._send(Asked.report(request_id, label, image))

    def erase_samples(self, sample_id: str) -> Erased:
        """Erase the samples of a request id, or a taught photograph by its id, at all Gateways."""
        return self._send(Asked.erase(sample_id))

    def _send(self, asked: Asked[T]) -> T:
        return self._thread.run(lambda: self._calls.send(asked))


class AsyncClient(HttpClient):
    """Calls a service from an event loop; :class:`Client` explains the arguments.

    Connections are kept until ``aclose``, or the end of an ``async with`` block.
    """

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._calls.aclose()

    @overload
    async def classify(  # type: ignore[overload-overlap]  # a str is a sequence of str too
        self, image: Image, **options: "Unpack[CallArguments]"
    ) -> Classification: ...

    @overload
    async def classify(
        self, image: Sequence[Image], **options: "Unpack[CallArguments]"
    ) -> list[Result]: ...

    @overload
    async def classify(
        self, image: Image, *, regions: Regions, **options: "Unpack[CallArguments]"
    ) -> list[Result]: ...

    async def classify(
        self, image: Images, *, regions: Regions | None = None, **options: "Unpack[CallArguments]"
    ) -> Classification | list[Result]:
        """Like :meth:`Client.classify`; files are read, and arrays packed, on another thread.

        Raises:
            TandemError: there is no answer; see :mod:`tandem_client.answers`.
        """
        call = await self._calls.call_of(image, CallOptions(regions=regions, **options))
        return answer_of(call, await self._calls.ask(call), self._options)

    def classify_many(
        self,
        images: Iterable[Image],
        *,
        concurrency: int = 16,
        ordered: bool = True,
        raise_errors: bool = False,
        **options: "Unpack[CallArguments]",
    ) -> AsyncIterator[Result]:
        """Classify any number of images: :meth:`Client.classify_many`.

        ``images`` is iterated on the event loop, and must not block it. Calls under way are
        cancelled when the iterator is closed (``contextlib.aclosing``), or when the iterating task
        is cancelled.

        Raises:
            TandemError: with ``raise_errors``.
        """
        if concurrency > (most := self._options.max_connections):
            raise ValueError(
                f"concurrency is {concurrency}, max_connections {most}: give it as many connections"
            )
        stream = Stream(CallOptions(**options), concurrency, ordered, raise_errors)
        return stream.on_loop(images, self._calls)

    async def teach(
        self,
        image: Image,
        label: str | int,
        *,
        channels: Channels | None = None,
        model_set: str | None = None,
    ) -> Taught:
        """Like :meth:`Client.teach`; a file is read, or an array packed, on another thread."""
        of = await asyncio.to_thread(Asked.teach, image, label, channels, model_set)
        return await self._calls.send(of)

    async def taught(self) -> TaughtFigures:
        """Like :meth:`Client.taught`."""
        return await self._calls.send(Asked(TaughtFigures, "GET", "/v1/teach"))

    async def report(
        self, request_id: str, label: str | int, *, image: int | None = None
    ) -> Feedback:
        """Like :meth:`Client.report`."""
        return await self._calls.send(Asked.report(request_id, label, image))

    async def erase_samples(self, sample_id: str) -> Erased:
        """Like :meth:`Client.erase_samples`."""
        return await self._calls.send(Asked.erase(sample_id))


class LoopThread:
    """Runs calls on an event loop of its own thread until ``close``, which cancels them.

    A call on an event loop can be cancelled at any moment. With blocking sockets each read and
    write has a timeout, but a slow service can stretch a call over any number of them. The thread
    is a daemon, so an interpreter that exits during a call does not wait for it.
    """

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls = calls
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="tandem client", daemon=True
        )
        self._started, self._lock = threading.Event(), threading.Lock()
        self._is_closed = False

    def submit(
        self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: object
    ) -> "concurrent.futures.Future[T]":
        """Start ``call(*arguments)`` on the thread; return its future."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the client is closed: make another")
            if not self._started.is_set():
                self._thread.start()
                self._started.wait()
            if not self._thread.is_alive():
                raise RuntimeError("a client works in one process: make one after a fork")
            return asyncio.run_coroutine_threadsafe(call(*arguments), self._loop)

    def run(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: object) -> T:
        """Return the result of ``call(*arguments)``; Ctrl-C meanwhile cancels it."""
        future = self.submit(call, *arguments)
        try:
            wait_for_any([future])
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread and close the connections; later calls fail."""
        with self._lock:
            if self._started.is_set() and not self._is_closed:
                self._loop.call_soon_threadsafe(self._stop.set)
            self._is_closed = True
        if self._started.is_set():
            self._thread.join()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._stop.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._calls.aclose()


def wait_for_any(futures: "list[concurrent.futures.Future[T]]") -> None:
    """Wait until one of the futures is done."""
    while not any(future.done() for future in futures):
        concurrent.futures.wait(futures, NOTICED_WITHIN_S, concurrent.futures.FIRST_COMPLETED)


@dataclass(frozen=True)
class Stream:
    """Sends any number of images: ``concurrency`` at a time, each with ``options``."""

    options: CallOptions
    concurrency: int
    ordered: bool
    raise_errors: bool

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}: give 1 or more")

    @property
    def window(self) -> int:
        """The limit of images that are started and not yet returned to the caller."""
        return AHEAD * self.concurrency

    def blocking(self, images: Iterable[Image], of_client: AsyncCalls) -> Iterator[Result]:
        """Yield results; requests run on another thread, ``images`` is iterated on this one."""
        calls = of_client.copy(self.concurrency)
        slots = asyncio.Semaphore(self.concurrency)
        with closing(LoopThread(calls)) as thread:
            begun: deque[concurrent.futures.Future[Result]] = deque()
            for index, image in enumerate(images):
                begun.append(thread.submit(self._result, calls, slots, index, image))
                while len(begun) >= self.window or any(f.done() for f in self._next_of(begun)):
                    yield self._next(begun)
            while begun:
                yield self._next(begun)

    async def on_loop(self, images: Iterable[Image], calls: AsyncCalls) -> AsyncIterator[Result]:
        """Yield results; the requests are tasks of the running loop."""
        slots = asyncio.Semaphore(self.concurrency)
        begun: deque[asyncio.Task[Result]] = deque()
        try:
            for index, image in enumerate(images):
                begun.append(asyncio.create_task(self._result(calls, slots, index, image)))
                while len(begun) >= self.window:
                    yield await self._next_task(begun)
            while begun:
                yield await self._next_task(begun)
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def _result(
        self, calls: AsyncCalls, slots: asyncio.Semaphore, index: int, image: Image
    ) -> Result:
        outcome: Outcome
        async with slots:
            try:
                (outcome,) = await calls.ask(await calls.call_of(image, self.options))
            except TandemError as error:
                outcome = error
        return result_of(index, image, outcome, calls.options)

    def _taken(self, result: Result) -> Result:
        if self.raise_errors and result.error is not None:
            raise result.error
        return result

    def _next_of(self, begun: "deque[T]") -> "list[T]":
        """Return the started images of which one may be the next result."""
        return list(begun)[:1] if self.ordered else list(begun)

    def _next(self, begun: "deque[concurrent.futures.Future[Result]]") -> Result:
        """Wait for the next result, and remove its future."""
        futures = self._next_of(begun)
        wait_for_any(futures)
        done = next(future for future in futures if future.done())
        begun.remove(done)
        return self._taken(done.result())

    async def _next_task(self, begun: "deque[asyncio.Task[Result]]") -> Result:
        """Wait for the next result; its task stays in ``begun`` to be cancelled until then."""
        tasks = self._next_of(begun)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done = next(task for task in tasks if task.done())
        begun.remove(done)
        return self._taken(done.result())
