"""Where small photos are decoded: on the event loop, or on the Decoder's threads."""

import asyncio
import threading

import cv2
import numpy as np
import pytest

from app.errors import DeadlineError
from app.serve.gateway import assemble
from app.settings import Settings
from app.stages.decoder import MAX_ON_LOOP, SMALL_BYTES, Decoder
from models.image import ImageInputs
from tests.support.tiny_networks import COLORS, picture


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


@pytest.fixture
def on_loop(tiny_set) -> Decoder:
    """A decoder whose loop has time."""
    return Decoder(Settings(model_set=str(tiny_set)), leaves_loop_time=lambda: True)


@pytest.mark.parametrize("has_time", [True, False])
async def test_while_the_loop_has_time_it_decodes_small_photos(tiny_set, monkeypatch, has_time):
    decoder = Decoder(Settings(model_set=str(tiny_set)), leaves_loop_time=lambda: has_time)
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
async def test_what_may_take_longer_is_for_the_threads(on_loop, monkeypatch, files, lane):
    used = threads_used(monkeypatch)
    decoded = await on_loop.decode(files, lane=lane)
    assert len(decoded.images) == len(files)
    assert MAIN not in used


async def test_one_turn_of_the_loop_decodes_a_batch_at_most(on_loop, monkeypatch):
    used = threads_used(monkeypatch)
    photo = picture("red", suffix=".jpg")
    for _ in range(2):  # the next turn may again
        await asyncio.gather(*(on_loop.decode([photo]) for _ in range(MAX_ON_LOOP + 3)))
    assert used.count(MAIN) == 2 * MAX_ON_LOOP
    assert len(used) == 2 * (MAX_ON_LOOP + 3)


async def test_while_the_loop_has_photos_it_is_a_busy_core_and_they_are_coming(on_loop):
    told: list[tuple[int, int]] = []
    on_loop.on_decoded(lambda: told.append((on_loop.num_coming, on_loop.num_busy)))
    photo = picture("red", suffix=".jpg")
    asked = [asyncio.ensure_future(on_loop.decode([photo])) for _ in range(3)]
    await asyncio.sleep(0)
    assert (on_loop.num_coming, on_loop.num_busy) == (3, 1)
    await asyncio.gather(*asked)
    await asyncio.sleep(0)
    assert (on_loop.num_coming, on_loop.num_busy) == (0, 0)
    assert told == [(0, 0)]


async def test_on_the_loop_too_faults_are_told_and_what_is_late_is_not_decoded(
    on_loop, monkeypatch
):
    used = threads_used(monkeypatch)
    photo = picture("red", suffix=".jpg")
    tables = photo.index(b"\xff\xdb")
    damaged = photo[: tables + 4] + b"\x09" + photo[tables + 5 :]  # no such quantisation table
    assert (await on_loop.decode([damaged])).faults[0].code == "corrupt_image"
    assert used == [MAIN]
    assert (await on_loop.decode([photo[:-4]])).faults[0].code == "corrupt_image"
    assert (await on_loop.decode([b""])).faults[0].code == "not_an_image"
    with pytest.raises(DeadlineError):
        await on_loop.decode([photo], 0.0)


async def test_a_decoder_beside_no_networks_decodes_on_threads(decoder, monkeypatch):
    used = threads_used(monkeypatch)
    await decoder.decode([picture("red", suffix=".jpg")])
    assert used != [MAIN]


async def test_beside_networks_the_scheduler_says_whether_the_loop_has_time(tiny_set, monkeypatch):
    graph = assemble(Settings(model_set=str(tiny_set)))
    (stages,) = graph.stages.joined
    used = threads_used(monkeypatch)
    photo = picture("red", suffix=".jpg")
    await stages.decoder.decode([photo])
    assert used == [MAIN]  # nothing waits, and nothing runs
    queue = stages.members[0]._queue
    monkeypatch.setattr(queue, "max_batch_size", 0)  # whatever waits is a backlog
    await stages.decoder.decode([photo])
    assert used[1] != MAIN
