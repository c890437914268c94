"""Where small photos are decoded: on the event loop, in a process, or on the Decoder's threads."""

import asyncio
import math
import threading
from contextlib import nullcontext

import cv2
import numpy as np
import pytest

from app.compute.inference_threads import InferenceThreads
from app.decoding.process import Photo
from app.decoding.small import SMALL_BYTES
from app.deployments import assembly
from app.deployments.assembly import LOOP_IMAGES_PER_S, Assembly, assemble
from app.deployments.decoder import MAX_ON_LOOP, Decoder
from app.errors import DeadlineError, DecodingDiedError
from app.settings import Settings
from models.image_inputs import ImageInputs
from tests.support.tiny_networks import COLORS, SIZE, picture


@pytest.fixture
def decoder(tiny_set) -> Decoder:
    return Decoder(Settings(model_set=str(tiny_set)))


def threads_used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of the thread that decodes each file from now on."""
    used: list[str] = []
    decode = ImageInputs.decode

    def noted(inputs: ImageInputs, *given):
        used.append(threading.current_thread().name)
        return decode(inputs, *given)

    monkeypatch.setattr(ImageInputs, "decode", noted)
    return used


MAIN = threading.main_thread().name


@pytest.mark.parametrize("has_time", [True, False])
async def test_while_the_loop_has_time_it_decodes_small_photos(tiny_set, monkeypatch, has_time):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    decoder.use_loop(lambda: has_time)
    used = threads_used(monkeypatch)
    decoded = await decoder.decode([picture("red", suffix=".jpg")])
    np.testing.assert_allclose(decoded.images[0, 0, 0], COLORS["red"], atol=2)
    assert len(decoded.decode_ms) == 1
    assert (used == [MAIN]) is has_time


def progressive() -> bytes:
    pixels = np.full((40, 40, 3), 90, np.uint8)
    return cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].tobytes()


@pytest.mark.parametrize(
    ("files", "lane"),
    [
        ([picture("red", suffix=".jpg")] * 2, "interactive"),  # a form
        ([picture("red", suffix=".jpg")], "bulk"),
        ([picture("red")], "interactive"),  # PNG takes longer
        ([picture("red", 1100, suffix=".jpg")], "interactive"),
        ([progressive()], "interactive"),
        ([picture("red", suffix=".jpg") + bytes(SMALL_BYTES)], "interactive"),
    ],
)
async def test_what_may_take_longer_is_for_the_threads(tiny_set, monkeypatch, files, lane):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    decoder.use_loop(lambda: True)
    used = threads_used(monkeypatch)
    decoded = await decoder.decode(files, lane=lane)
    assert len(decoded.images) == len(files)
    assert MAIN not in used


async def test_one_turn_of_the_loop_decodes_a_batch_at_most(tiny_set, monkeypatch):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    decoder.use_loop(lambda: True)
    used = threads_used(monkeypatch)
    photo = picture("red", suffix=".jpg")
    for _ in range(2):  # the next turn may again
        await asyncio.gather(*(decoder.decode([photo]) for _ in range(MAX_ON_LOOP + 3)))
    assert used.count(MAIN) == 2 * MAX_ON_LOOP
    assert len(used) == 2 * (MAX_ON_LOOP + 3)


async def test_while_the_loop_has_photos_it_is_a_busy_core_and_they_are_coming(tiny_set):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    decoder.use_loop(lambda: True)
    told: list[tuple[int, int]] = []
    decoder.tell(lambda: told.append((decoder.num_coming, decoder.num_busy)))
    photo = picture("red", suffix=".jpg")
    asked = [asyncio.ensure_future(decoder.decode([photo])) for _ in range(3)]
    await asyncio.sleep(0)
    assert (decoder.num_coming, decoder.num_busy) == (3, 1)
    await asyncio.gather(*asked)
    await asyncio.sleep(0)
    assert (decoder.num_coming, decoder.num_busy) == (0, 0)
    assert told == [(0, 0)]


async def test_on_the_loop_too_faults_are_told_and_what_is_late_is_not_decoded(
    tiny_set, monkeypatch
):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    decoder.use_loop(lambda: True)
    used = threads_used(monkeypatch)
    photo = picture("red", suffix=".jpg")
    tables = photo.index(b"\xff\xdb")
    damaged = photo[: tables + 4] + b"\x09" + photo[tables + 5 :]  # no such quantisation table
    assert (await decoder.decode([damaged])).faults[0].code == "corrupt_image"
    assert used == [MAIN]
    assert (await decoder.decode([photo[:-4]])).faults[0].code == "corrupt_image"
    assert (await decoder.decode([b""])).faults[0].code == "not_an_image"
    with pytest.raises(DeadlineError):
        await decoder.decode([photo], 0.0)


class FakeProcesses:
    """Decoding processes whose answers a test gives."""

    def __init__(self) -> None:
        self.given: list[asyncio.Future[Photo | None]] = []
        self.takes, self.num_busy, self.num_checked = True, 1, 0
        self.ended = lambda: None

    @property
    def num_open(self) -> int:
        return sum(not future.done() for future in self.given)

    def submit(self, data: bytes) -> "asyncio.Future[Photo | None] | None":
        if not self.takes:
            return None
        self.given.append(asyncio.get_running_loop().create_future())
        return self.given[-1]

    def tell(self, ended) -> None:
        self.ended = ended

    def end_hung(self) -> None:
        self.num_checked += 1


JPEG = picture("red", suffix=".jpg")
DECODED = Photo(np.full(SIZE * SIZE * 3, 7, np.uint8), 1.0, 1.5, 24, 24)


@pytest.fixture
def processes(decoder) -> FakeProcesses:
    """The decoder's, which are wanted."""
    processes = FakeProcesses()
    decoder.use_processes(processes, lambda: True)
    return processes


async def test_processes_decode_where_they_are_wanted(decoder, processes, monkeypatch):
    used = threads_used(monkeypatch)
    told = []
    decoder.tell(lambda: told.append(1))
    asked = asyncio.ensure_future(decoder.decode([JPEG]))
    await asyncio.sleep(0)
    assert (decoder.num_coming, decoder.num_busy) == (1, 2)  # a process, and the event loop
    processes.num_busy = 0
    assert decoder.num_busy == 0
    processes.given[0].set_result(DECODED)
    decoded = await asked
    assert decoded.images.shape == (1, SIZE, SIZE, 3)
    assert (decoded.images == 7).all()
    assert decoded.decode_ms == (500.0,)
    assert (used, decoder.num_coming) == ([], 0)
    processes.ended()
    assert told == [1]
    await decoder.check_health()
    assert processes.num_checked == 1


@pytest.mark.parametrize(("is_wanted", "takes"), [(False, True), (True, False)])
async def test_else_the_loop_does_if_it_has_time(decoder, processes, monkeypatch, is_wanted, takes):
    decoder.use_processes(processes, lambda: is_wanted)
    processes.takes = takes
    used = threads_used(monkeypatch)
    await decoder.decode([JPEG])
    assert (len(used), MAIN in used) == (1, False)
    decoder.use_loop(lambda: True)
    await decoder.decode([JPEG])
    assert used[1:] == [MAIN]
    assert not processes.given


async def test_what_a_process_cannot_decode_a_thread_does(decoder, processes, monkeypatch):
    used = threads_used(monkeypatch)
    for data, fault in [(JPEG, None), (b"text", "not_an_image")]:
        asked = asyncio.ensure_future(decoder.decode([data]))
        await asyncio.sleep(0)
        processes.given[-1].set_result(None)
        decoded = await asked
        assert [one.code for one in decoded.faults.values()] == ([fault] if fault else [])
    assert len(used) == 1
    assert MAIN not in used


async def test_the_image_that_ended_its_process_is_told_so_and_not_tried_again(
    decoder, processes, monkeypatch
):
    used = threads_used(monkeypatch)
    asked = asyncio.ensure_future(decoder.decode([JPEG]))
    await asyncio.sleep(0)
    processes.given[0].set_exception(DecodingDiedError("it died"))
    decoded = await asked
    assert (decoded.faults[0].code, decoded.faults[0].status) == ("decoding_died", 500)
    assert used == []


async def test_what_is_late_or_large_or_of_many_is_not_for_processes(decoder, processes):
    with pytest.raises(DeadlineError):
        await decoder.decode([JPEG], 0.0)
    await decoder.decode([JPEG, JPEG])
    await decoder.decode([JPEG], lane="bulk")
    await decoder.decode([JPEG + bytes(SMALL_BYTES)])
    assert not processes.given


CHEAP_S, DEAR_S = 1e-4, 1.0  # of an image in a network


def with_networks_of(graph: Assembly, image_s: float) -> Assembly:
    for member in graph.own_members:
        member.image_s = image_s
    return graph


async def test_photos_that_meet_are_decoded_in_a_process_with_the_same_pixels(tiny_set):
    """The whole way, with a process that is started by the first two that meet."""
    graph = with_networks_of(assemble(Settings(model_set=str(tiny_set))), CHEAP_S)
    decoder, photo = graph.own_decoder, picture("blue", 100, suffix=".jpg")
    alone = (await decoder.decode([photo])).images
    assert decoder._processes._all[0]._child is None
    with graph.own_members[0].usage.under_way(1):
        async with asyncio.timeout(60):
            while not decoder._processes.cpu_s:  # until it is ready, others decode
                decoded = await decoder.decode([photo])
                np.testing.assert_array_equal(decoded.images, alone)
    assert graph.service.usage.figures()["cpu_ms"] > decoder._processes.cpu_s * 1e3 > 0
    decoder._processes.close()


async def test_where_networks_are_dear_no_process_is_started(tiny_set):
    graph = assemble(Settings(model_set=str(tiny_set)))
    for image_s in (math.inf, DEAR_S):  # not known yet, and known
        with_networks_of(graph, image_s)
        with graph.own_members[0].usage.under_way(1):
            assert len((await graph.own_decoder.decode([JPEG])).images) == 1
        assert all(one._child is None for one in graph.own_decoder._processes._all)


async def test_none_is_started_where_none_is_wanted(tiny_set):
    settings = Settings(model_set=str(tiny_set), decode_processes=0)
    graph = with_networks_of(assemble(settings), CHEAP_S)
    assert graph.own_decoder._processes is None
    with graph.own_members[0].usage.under_way(1):
        assert len((await graph.own_decoder.decode([JPEG])).images) == 1


@pytest.mark.parametrize(
    ("image_s", "is_idle", "num_waiting", "uses_loop"),
    [
        (math.inf, False, 0, True),  # nobody knows yet
        (DEAR_S, False, 0, True),
        (DEAR_S, False, 1000, False),  # more than fills the cores' batches
        (CHEAP_S, False, 0, False),
        (CHEAP_S, True, 0, True),
    ],
)
async def test_the_loop_decodes_where_it_keeps_up_with_the_networks_or_nothing_is_under_way(
    tiny_set, monkeypatch, image_s, is_idle, num_waiting, uses_loop
):
    graph = assemble(Settings(model_set=str(tiny_set), decode_processes=0))
    with_networks_of(graph, image_s)
    for member in graph.own_members:
        monkeypatch.setattr(type(member), "num_waiting", num_waiting)
    used = threads_used(monkeypatch)
    with nullcontext() if is_idle else graph.own_members[0].usage.under_way(1):
        await graph.own_decoder.decode([JPEG])
    assert (used == [MAIN]) is uses_loop


async def test_what_counts_is_what_all_members_take_on_all_threads(tiny_set, monkeypatch):
    monkeypatch.setattr(assembly, "replica_inference_threads", lambda _: InferenceThreads(4))
    graph = assemble(Settings(model_set=str(tiny_set), decode_processes=0))
    used = threads_used(monkeypatch)
    with graph.own_members[0].usage.under_way(1):
        for share, is_on_loop in ((1.1, True), (0.9, False)):
            with_networks_of(graph, share * 4 / len(graph.own_members) / LOOP_IMAGES_PER_S)
            await graph.own_decoder.decode([JPEG])
            assert (used[-1] == MAIN) is is_on_loop
