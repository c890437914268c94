"""The decode queue: photos pass large pictures, which have limits of their own."""

import asyncio
import threading
import time

import pytest

from app.errors import DeadlineError, OverloadedError
from app.queueing.scheduler import BULK_EVERY, SHADOW, Lane
from app.stages.decoder import DecodeQueue, FilesToDecode, Heavy, LoopTurn
from models.errors import CorruptImageError, TooManyPixelsError
from tests.support.hand_clock import HandClock

WITHIN_S = 30  # for what a thread does at once


class Threads:
    """A queue, and files whose decoding lasts until the test says so."""

    def __init__(self, num_threads: int = 2, max_heavy_pixels: int = 100) -> None:
        self.clock = HandClock()
        self.queue: DecodeQueue[str] = DecodeQueue(num_threads, max_heavy_pixels, self.clock)
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def file(self, name, heavy_pixels=0):
        gate = self._gates[name] = threading.Event()

        def decode() -> str:
            self.begun.append(name)
            if not gate.wait(WITHIN_S):
                raise TimeoutError(name)
            return name

        return (lambda: Heavy(heavy_pixels, decode)) if heavy_pixels else decode

    def call(self, within_s: float = 10, lane: Lane = "interactive") -> FilesToDecode:
        return FilesToDecode(lane, self.clock.now + within_s)

    def submit(self, name, pixels=0, call=None, **options):
        """Submit a file, a large picture if it has ``pixels``."""
        return self.queue.submit(call or self.call(**options), self.file(name, pixels))

    async def begin(self, *names: str, pixels: int = 0) -> list[asyncio.Future[str]]:
        """Submit files and wait until they are being decoded."""
        futures = [self.submit(name, pixels) for name in names]
        await self.wait_begun(*names)
        return futures

    async def wait_begun(self, *names: str) -> None:
        await until(lambda: set(names) <= set(self.begun))

    async def decode(self, name: str, pixels: int = 0) -> None:
        """Check that a file is decoded without any other's end."""
        decoding = self.submit(name, pixels)
        self.end(name)
        assert await decoding == name

    def end(self, *names: str) -> None:
        for name in names or self._gates:
            self._gates[name].set()


async def until(is_true):
    async with asyncio.timeout(WITHIN_S):
        while not is_true():
            await asyncio.sleep(0.001)


@pytest.fixture
async def threads():
    made = Threads()
    yield made
    made.end()


async def test_a_thread_takes_the_next_file_while_the_loop_is_held():
    threads = Threads(num_threads=1)
    photos = [threads.submit(name) for name in ("one", "two")]
    threads.end()
    deadline = time.monotonic() + WITHIN_S
    while threads.begun != ["one", "two"]:  # nothing of the loop runs in between
        assert time.monotonic() < deadline
    assert await asyncio.gather(*photos) == ["one", "two"]


async def test_a_photo_passes_large_pictures_that_came_before_it(threads):
    """As many as there are threads: they never have the last one."""
    names = ["large0", "large1", "large2"]
    large = [threads.submit(name, 10) for name in names]
    await threads.wait_begun("large0")
    await threads.decode("photo")
    assert threads.begun == ["large0", "photo"]
    for name in names:
        await threads.wait_begun(name)
        threads.end(name)
    assert await asyncio.gather(*large) == names


async def test_interactive_files_pass_a_form(threads):
    form = [threads.submit(f"form{i}", lane="bulk") for i in range(4)]
    await threads.wait_begun("form0", "form1")
    photo = threads.submit("photo")
    threads.end("form0")
    await threads.wait_begun("photo")
    assert "form2" not in threads.begun
    threads.end()
    assert await asyncio.gather(photo, *form) == ["photo", "form0", "form1", "form2", "form3"]


async def test_a_large_picture_is_not_kept_out_by_many_photos():
    threads = Threads(num_threads=1)
    (first,) = await threads.begin("first")
    large = threads.submit("large", 10)
    photos = [threads.submit(f"photo{i}") for i in range(20)]
    threads.end()
    await asyncio.gather(first, large, *photos)
    assert threads.begun.index("large") < 12


async def test_every_file_has_a_turn_while_large_pictures_end(threads: Threads) -> None:
    """A large picture that ended lets a thread take the next one in the turn of a photo."""
    await threads.begin("large", pixels=10)
    threads.submit("next large", 10)
    photos = [threads.submit(f"photo {n}") for n in range(30)]
    for n in range(30):
        if n == 12:
            threads.end("large", "next large")
        threads.end(f"photo {n}")
        await threads.wait_begun(f"photo {n}")
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*photos)
    assert threads.queue.num_coming == 0


async def test_one_thread_decodes_large_pictures_too():
    await Threads(num_threads=1).decode("large", 10)


async def test_pixels_under_way_are_limited_and_given_back(threads):
    (first,) = await threads.begin("first", pixels=60)
    refusal = r"60 pixels .* 50 more exceed the limit of 100; try again"
    with pytest.raises(OverloadedError, match=refusal):
        await threads.submit("second", 50)
    await threads.decode("photo")  # is no matter of pixels
    threads.end("first")
    assert await first == "first"
    await threads.decode("again", 100)


async def test_a_request_that_alone_has_too_many_is_told_so_and_not_to_come_back(threads):
    call = threads.call(lane="bulk")
    first = threads.submit("first", 60, call)
    await threads.wait_begun("first")
    with pytest.raises(TooManyPixelsError, match=r"over 100 pixels .* send fewer files at a time"):
        await threads.submit("second", 60, call)
    threads.end("first")
    await first


async def test_the_deadline_is_looked_at_when_a_file_has_its_turn(threads):
    call = threads.call()
    running = await threads.begin("a", "b")
    late = [threads.submit("late", call=call), threads.submit("large", 5, call)]
    threads.clock.now += 10
    threads.end("a", "b")
    await asyncio.gather(*running)
    for future in late:
        with pytest.raises(DeadlineError, match="before the image was decoded; try again"):
            await future
    assert threads.begun == ["a", "b"]


async def test_a_large_picture_whose_time_ends_while_it_waits_gives_its_pixels_back(threads):
    call = threads.call(1)
    (first,) = await threads.begin("first", pixels=50)
    late = threads.submit("late", 50, call)
    (photo,) = await threads.begin("photo")  # so the header of the other has been read too
    threads.clock.now += 1
    threads.end("first", "photo")
    await asyncio.gather(first, photo)
    with pytest.raises(DeadlineError):
        await late
    await threads.decode("again", 100)


async def test_what_a_caller_that_left_had_queued_is_not_decoded(threads):
    running = await threads.begin("a", "b")
    gone, stays = threads.submit("gone"), threads.submit("stays")
    gone.cancel()
    threads.end()
    await asyncio.gather(*running, stays)
    assert "gone" not in threads.begun


async def test_a_caller_that_leaves_while_its_file_is_decoded_frees_the_thread_in_the_end(threads):
    leaving = [threads.submit(name, 50) for name in ("a", "b")]
    await threads.wait_begun("a")
    for future in leaving:
        future.cancel()
    threads.end("a")
    await until(lambda: not threads.queue._heavy_pixels)
    await threads.decode("again", 100)
    assert "b" not in threads.begun


async def test_a_large_picture_whose_caller_left_while_it_waited_holds_no_pixels(threads):
    (first,) = await threads.begin("first", pixels=60)
    gone = threads.submit("gone", 40)
    (photo,) = await threads.begin("photo")  # so the header of the other has been read too
    gone.cancel()
    threads.end("photo")
    again = threads.submit("again", 40)
    with pytest.raises(OverloadedError, match=r"100 pixels .* 1 more exceed the limit of 100"):
        await threads.submit("too many", 1)
    threads.end("first", "again")
    assert await asyncio.gather(first, photo, again) == ["first", "photo", "again"]
    assert "gone" not in threads.begun


async def test_what_a_file_raises_is_its_own(threads):
    def fail() -> str:
        raise CorruptImageError("damaged")

    for file in (fail, lambda: Heavy(5, fail)):
        with pytest.raises(CorruptImageError):
            await threads.queue.submit(threads.call(), file)
    await threads.decode("photo")


async def test_images_that_are_coming_are_counted_without_the_heavy_ones(threads):
    photos = [threads.submit(f"photo{i}") for i in range(3)]
    assert threads.queue.num_coming == 3
    threads.end()
    await asyncio.gather(*photos)
    assert threads.queue.num_coming == 0
    large = [threads.submit(f"large{i}", 10) for i in range(2)]
    await threads.wait_begun("large0")
    await until(lambda: not threads.queue.num_coming)  # its header has been looked at
    photo = threads.submit("photo")
    assert threads.queue.num_coming == 1
    threads.end("photo", "large0")
    await threads.wait_begun("large1")
    threads.end()
    await asyncio.gather(photo, *large)
    assert threads.queue.num_coming == 0


async def test_the_end_of_every_file_is_told_after_its_result(threads):
    ends: list[list[bool]] = []
    photos = [threads.submit(name) for name in ("one", "gone", "late")]
    threads.queue.on_end = lambda: ends.append([photo.done() for photo in photos])
    await threads.wait_begun("one", "gone")
    photos[1].cancel()
    threads.clock.now += 11
    threads.end("one", "gone")
    with pytest.raises(DeadlineError):
        await photos[2]
    assert await photos[0] == "one"
    await until(lambda: len(ends) == 3)
    assert (ends[-1], threads.queue.num_coming) == ([True, True, True], 0)


async def test_a_large_picture_waits_for_no_copies():
    threads = Threads(num_threads=1)
    (first,) = await threads.begin("first")
    large = threads.submit("large", 10)
    photo = threads.submit("photo")  # a thread sees here that the other one is large
    copies = [threads.submit(f"copy{n}", lane=SHADOW) for n in range(3)]
    threads.end()
    await asyncio.gather(first, large, photo, *copies)
    assert threads.begun.index("large") < threads.begun.index("copy0")


async def test_a_copy_is_decoded_while_photos_never_stop_coming():
    threads = Threads(num_threads=1)
    (first,) = await threads.begin("first")
    copy = threads.submit("copy", lane=SHADOW)
    photos = [threads.submit(f"photo{n}") for n in range(2 * BULK_EVERY)]
    threads.end()
    await asyncio.gather(first, copy, *photos)
    assert 1 < threads.begun.index("copy") <= BULK_EVERY


async def test_first_all_of_a_turn_are_asked_for_then_all_decoded_then_all_handed_on():
    happened: list[str] = []

    def decode(data: bytes) -> bytes:
        happened.append(f"decode {data!r}")
        return data.upper()

    turn = LoopTurn(decode, most=8)

    async def request(data: bytes) -> bytes:
        happened.append(f"ask {data!r}")
        answer = await turn.submit(data)
        happened.append(f"got {answer!r}")
        return answer

    assert await asyncio.gather(request(b"a"), request(b"b")) == [b"A", b"B"]
    asked, decoded = ["ask b'a'", "ask b'b'"], ["decode b'a'", "decode b'b'"]
    assert happened == [*asked, *decoded, "got b'A'", "got b'B'"]


async def test_an_error_is_its_own_files_and_who_went_away_is_not_decoded_for():
    decoded: list[bytes] = []

    def decode(data: bytes) -> bytes:
        decoded.append(data)
        if data == b"bad":
            raise MemoryError(data)
        return data

    turn = LoopTurn(decode, most=8)
    bad, gone, good = (turn.submit(data) for data in (b"bad", b"gone", b"good"))
    gone.cancel()
    assert await good == b"good"
    with pytest.raises(MemoryError):
        await bad
    assert decoded == [b"bad", b"good"]


async def test_who_waits_for_images_is_told_once_they_were_handed_on():
    turn: LoopTurn[bytes] = LoopTurn(bytes, most=8)
    happened: list[str] = []
    turn.on_end = lambda: happened.append("told")

    async def request() -> None:
        await turn.submit(b"")
        happened.append("handed on")

    await asyncio.gather(request(), request())
    await asyncio.sleep(0)
    assert happened == ["handed on", "handed on", "told"]
