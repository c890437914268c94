"""The Decoder: good and bad files side by side, large pictures, photos on the event loop."""

import asyncio
import io
import threading

import cv2
import numpy as np
import pillow_heif
import pytest
from PIL import Image

from app.errors import DeadlineError, HeavyFileError, UnhealthyError
from app.serve.gateway import assemble
from app.serve.replica import decode_many
from app.serve.shared_calls import DECODED, Question, SharedCall, pack_call
from app.settings import Settings
from app.stages.decoder import AVIF_PIXELS, HEAVY_PIXELS, MAX_ON_LOOP, SMALL_BYTES, Decoder, Heavy
from app.stages.threads import MAX_RUN_S
from models.errors import TooManyPixelsError
from models.image import ImageInputs
from tests.support.cases import cases
from tests.support.icc_profiles import DISPLAY_P3, matrix_profile
from tests.support.images import encode
from tests.support.tiny_networks import COLORS, SIZE, picture

LARGE_SIDE = 1500  # px: as PNG over HEAVY_PIXELS
P3 = matrix_profile(DISPLAY_P3)
MAIN = threading.main_thread().name


@pytest.fixture
def decoder(tiny_set) -> Decoder:
    return Decoder(Settings(model_set=str(tiny_set), max_pixels=10_000))


async def test_good_and_bad_files_side_by_side(decoder):
    files = [b"text", picture("blue"), picture("green"), b"", picture("red", suffix=".jpg")]
    decoded = await decoder.decode(files)
    assert (decoded.images.shape, decoded.images.dtype) == ((3, SIZE, SIZE, 3), np.uint8)
    for image, color in zip(decoded.images, COLORS, strict=True):
        np.testing.assert_allclose(image[0, 0], COLORS[color], atol=2)
    assert {i: f.code for i, f in decoded.faults.items()} == {0: "not_an_image", 3: "not_an_image"}
    assert len(decoded.decode_ms) == 3
    assert all(ms > 0 for ms in decoded.decode_ms)


async def test_what_phones_send_is_decoded_within_the_same_limits(decoder):
    heic = io.BytesIO()
    opaque = np.full((99, 99, 3), COLORS["blue"][::-1], np.uint8)
    pillow_heif.from_pillow(Image.fromarray(opaque)).save(heic, quality=95, chroma=444)
    files = [heic.getvalue(), picture("green", 99, suffix=".avif"), picture("red", 101, ".avif")]
    decoded = await decoder.decode(files)
    for image, color in zip(decoded.images, ("blue", "green"), strict=True):
        np.testing.assert_allclose(image[0, 0], COLORS[color], atol=3)
    assert {i: f.code for i, f in decoded.faults.items()} == {2: "too_many_pixels"}


async def test_wide_gamut_becomes_srgb_if_asked_for(tiny_set):
    red = encode(np.full((32, 32, 3), (234, 51, 35), np.uint8), "PNG", icc_profile=P3)
    for icc_profiles, right in (("ignore", (35, 51, 234)), ("convert", (0, 0, 255))):
        decoder = Decoder(Settings(model_set=str(tiny_set), icc_profiles=icc_profiles))
        (image,) = (await decoder.decode([red])).images
        np.testing.assert_allclose(image[0, 0], right, atol=2)


@pytest.mark.parametrize("files", [[], [b"a", b"b"]])
async def test_nothing_good_is_an_empty_tensor_of_the_right_shape(decoder, files):
    decoded = await decoder.decode(files)
    assert decoded.images.shape == (0, SIZE, SIZE, 3)
    assert len(decoded.faults) == len(files)


def large_png(color: str = "green") -> bytes:
    assert LARGE_SIDE**2 > HEAVY_PIXELS
    return picture(color, LARGE_SIDE)


async def test_large_pictures_are_decoded_like_others_up_to_their_limit(tiny_set):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    decoded = await decoder.decode([large_png(), picture("red"), large_png("blue")])
    assert not decoded.faults
    for image, color in zip(decoded.images, ("green", "red", "blue"), strict=True):
        np.testing.assert_allclose(image[3, 3], COLORS[color], atol=2)
    settings = Settings(model_set=str(tiny_set), max_full_pixels=LARGE_SIDE**2 - 1)
    jpeg = picture("red", LARGE_SIDE, suffix=".jpg")
    decoded = await Decoder(settings).decode([large_png(), jpeg])
    assert decoded.faults[0].code == "too_many_pixels"
    assert "cannot be decoded at reduced scale; then at most 2,249,999" in decoded.faults[0].message
    assert len(decoded.images) == 1


async def test_large_pictures_of_one_request_have_a_limit_together(tiny_set):
    settings = Settings(
        model_set=str(tiny_set), max_full_pixels=LARGE_SIDE**2, max_heavy_pixels=2 * LARGE_SIDE**2
    )
    decoder = Decoder(settings)
    assert len((await decoder.decode([large_png()] * 2)).images) == 2
    with pytest.raises(TooManyPixelsError, match="send fewer files at a time"):
        await decoder.decode([large_png()] * 3)
    async with asyncio.timeout(60):  # what had begun goes on until it has been decoded
        while decoder.queue._heavy_pixels:
            await asyncio.sleep(0.001)
    assert len((await decoder.decode([large_png()] * 2)).images) == 2


async def test_avifs_count_as_large_whatever_they_announce(tiny_set):
    """libavif decodes a stream that is larger than its header says."""
    most = 2 * AVIF_PIXELS
    settings = Settings(model_set=str(tiny_set), max_full_pixels=most, max_heavy_pixels=most)
    decoder, avif = Decoder(settings), picture("green", 24, suffix=".avif")
    assert len((await decoder.decode([avif] * 2)).images) == 2
    with pytest.raises(TooManyPixelsError, match="send fewer files at a time"):
        await decoder.decode([avif] * 3)
    settings = Settings(model_set=str(tiny_set), max_full_pixels=2**20, max_heavy_pixels=2**20)
    decoder = Decoder(settings)
    assert len((await decoder.decode([avif])).images) == 1
    assert isinstance(decoder._begin(avif, takes_heavy=True), Heavy)  # never on every thread


async def test_in_a_call_of_many_requests_a_large_picture_is_sent_back(tiny_set):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    files = [[picture("red")], [large_png()], [b"text"]]
    parts = [Question(one, None, 60.0, None) for one in files]
    answer = await decode_many(decoder, pack_call(SharedCall(parts, "interactive")))
    photo, large, text = DECODED.read(answer)
    assert (len(photo.images), len(text.images), list(text.faults)) == (1, 0, [0])
    assert isinstance(large, HeavyFileError)
    alone = pack_call(SharedCall(parts[1:2], "interactive", is_alone=True))
    (large,) = DECODED.read(await decode_many(decoder, alone))
    assert large.images.shape == (1, SIZE, SIZE, 3)


async def test_a_decoder_that_hangs_is_unhealthy_and_so_is_the_gateway_that_has_it(
    tiny_set, monkeypatch
):
    begun, gate = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        gate.wait(60)

    graph = assemble(Settings(model_set=str(tiny_set), compile_cache=None))
    await graph.check_health()
    monkeypatch.setattr("models.image.decode_images", hang)
    decoding = asyncio.ensure_future(graph.stages.joined[0].decoder.decode([picture("red")]))
    try:
        await asyncio.to_thread(begun.wait, 60)
        await graph.check_health()
        clock = graph.stages.joined[0].decoder._health._clock
        graph.stages.joined[0].decoder._health._clock = lambda: clock() + MAX_RUN_S + 1
        with pytest.raises(UnhealthyError, match="a file that is decoded has run for"):
            await graph.check_health()
    finally:
        gate.set()
        decoding.cancel()


# Where small photos are decoded: on the event loop, or on the Decoder's threads.


def threads_used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of the thread that decodes each file from now on."""
    used: list[str] = []
    decode = ImageInputs.decode

    def noted(inputs: ImageInputs, *given):
        used.append(threading.current_thread().name)
        return decode(inputs, *given)

    monkeypatch.setattr(ImageInputs, "decode", noted)
    return used


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


@cases(
    "files, lane",
    ([picture("red", suffix=".jpg")] * 2, "interactive"),  # a form
    ([picture("red", suffix=".jpg")], "bulk"),
    ([picture("red")], "interactive"),  # PNG takes longer
    ([picture("red", 1100, suffix=".jpg")], "interactive"),
    ([progressive()], "interactive"),
    ([picture("red", suffix=".jpg") + bytes(SMALL_BYTES)], "interactive"),
)
async def test_what_may_take_longer_is_for_the_threads(on_loop, monkeypatch, files, lane):
    used = threads_used(monkeypatch)
    assert len((await on_loop.decode(files, lane=lane)).images) == len(files)
    assert MAIN not in used


async def test_one_turn_of_the_loop_decodes_a_batch_at_most(on_loop, monkeypatch):
    used = threads_used(monkeypatch)
    photo = picture("red", suffix=".jpg")
    for _ in range(2):  # the next turn may again
        await asyncio.gather(*(on_loop.decode([photo]) for _ in range(MAX_ON_LOOP + 3)))
    assert (used.count(MAIN), len(used)) == (2 * MAX_ON_LOOP, 2 * (MAX_ON_LOOP + 3))


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
    (stages,) = assemble(Settings(model_set=str(tiny_set))).stages.joined
    used = threads_used(monkeypatch)
    photo = picture("red", suffix=".jpg")
    await stages.decoder.decode([photo])
    assert used == [MAIN]  # nothing waits, and nothing runs
    queue = stages.members[0]._queue
    monkeypatch.setattr(queue, "max_batch_size", 0)  # whatever waits is a backlog
    await stages.decoder.decode([photo])
    assert used[1] != MAIN
