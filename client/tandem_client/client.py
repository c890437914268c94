"""The blocking client, the client for asyncio, and what both run on."""

import asyncio
import concurrent.futures
import ssl
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar, overload

import httpx

from tandem_client.answers import Classification, Result, TandemError
from tandem_client.exchange import (
    Attempts,
    Call,
    CallOptions,
    Options,
    Outcome,
    RetryPolicy,
    Tls,
    answer_of,
    build,
    checked,
    checked_url,
    failed,
    failure,
    is_loopback,
    outcomes,
)
from tandem_client.images import Channels, Image, path_of, takes_long

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
            TandemError: there is no answer; see :mod:`tandem_client.answers`.

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
            TandemError: there is no answer; see :mod:`tandem_client.answers`.

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
            TandemError: there is no answer; see :mod:`tandem_client.answers`.

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


T = TypeVar("T")
# Ctrl-C just before a thread starts to wait is noticed only after the wait.
NOTICED_WITHIN_S = 0.5


class LoopThread:
    """Runs calls on an event loop until ``close``, which cancels calls under way.

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

    def __enter__(self) -> "LoopThread":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

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


# Started images and unconsumed results for each request under way: later images need not wait for a
# slow one, and memory stays bounded.
AHEAD = 4


@dataclass(frozen=True)
class Stream:
    """The way images are sent: ``concurrency`` at a time, each with ``options``."""

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

    def blocking(
        self, images: Iterable[Image], options: Options, context: ssl.SSLContext
    ) -> Iterator[Result]:
        """Yield results; requests run on another thread, ``images`` is iterated on this one."""
        connections = replace(options, max_connections=self.concurrency)
        calls, slots = AsyncCalls(connections, context), asyncio.Semaphore(self.concurrency)
        with LoopThread(calls) as thread:
            begun: deque[concurrent.futures.Future[Result]] = deque()
            for index, image in enumerate(images):
                begun.append(thread.submit(self._result, calls, slots, index, image))
                while len(begun) >= self.window or (begun and self._first_done(begun)):
                    yield self._taken(self._next(begun).result())
            while begun:
                yield self._taken(self._next(begun).result())

    async def on_loop(self, images: Iterable[Image], calls: AsyncCalls) -> AsyncIterator[Result]:
        """Yield results; the requests are tasks of the running loop."""
        slots = asyncio.Semaphore(self.concurrency)
        begun: deque[asyncio.Task[Result]] = deque()
        try:
            for index, image in enumerate(images):
                begun.append(asyncio.create_task(self._result(calls, slots, index, image)))
                while len(begun) >= self.window:
                    yield self._taken(await self._next_task(begun))
            while begun:
                yield self._taken(await self._next_task(begun))
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def _result(
        self, calls: AsyncCalls, slots: asyncio.Semaphore, index: int, image: Image
    ) -> Result:
        """Return an image's result, once a place is free."""
        async with slots:
            return await calls.result(index, image, self.options)

    def _taken(self, result: Result) -> Result:
        if self.raise_errors and result.error is not None:
            raise result.error
        return result

    def _first_done(self, begun: "deque[concurrent.futures.Future[Result]]") -> bool:
        return begun[0].done() if self.ordered else any(future.done() for future in begun)

    def _next(
        self, begun: "deque[concurrent.futures.Future[Result]]"
    ) -> "concurrent.futures.Future[Result]":
        """Remove and return the future of the next result, once it is done."""
        waited = [begun[0]] if self.ordered else list(begun)
        wait_for_any(waited)
        done = next(future for future in waited if future.done())
        begun.remove(done)
        return done

    async def _next_task(self, begun: "deque[asyncio.Task[Result]]") -> Result:
        """Wait for the next result; its task stays in ``begun`` to be cancelled until then."""
        if self.ordered:
            done = begun[0]
            await asyncio.wait([done])
        else:
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            done = next(task for task in begun if task.done())
        begun.remove(done)
        return done.result()
