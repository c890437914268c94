"""The Decoder: good and bad files side by side."""

import asyncio
import io
import threading

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from app.errors import DeadlineError, HeavyFileError, UnhealthyError
from app.queueing.decode_queue import Heavy
from app.serve.gateway import assemble
from app.serve.replica import decode_many
from app.serve.shared_calls import Question, SharedCall, pack_call, read_decoded
from app.settings import Settings
from app.stages.decoder import AVIF_PIXELS, HEAVY_PIXELS, Decoder
from app.stages.threads import MAX_RUN_S
from models.errors import TooManyPixelsError
from tests.support.tiny_networks import COLORS, SIZE, picture


@pytest.fixture
def decoder(tiny_set) -> Decoder:
    return Decoder(Settings(model_set=str(tiny_set), max_pixels=10_000))


async def test_good_and_bad_files_side_by_side(decoder):
    files = [b"text", picture("blue"), picture("green"), b"", picture("red", suffix=".jpg")]
    decoded = await decoder.decode(files)
    assert decoded.images.shape == (3, SIZE, SIZE, 3)
    assert decoded.images.dtype == np.uint8
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


async def test_the_limit_of_pixels_is_the_settings(decoder):
    decoded = await decoder.decode([picture("red", 101), picture("green", 100)])
    assert decoded.faults[0].code == "too_many_pixels"
    assert len(decoded.images) == 1


async def test_what_is_too_late_is_not_decoded(decoder):
    with pytest.raises(DeadlineError, match="before the image was decoded; try again"):
        await decoder.decode([picture("red")], 0.0)


@pytest.mark.parametrize("files", [[], [b"a", b"b"]])
async def test_nothing_good_is_an_empty_tensor_of_the_right_shape(decoder, files):
    decoded = await decoder.decode(files)
    assert decoded.images.shape == (0, SIZE, SIZE, 3)
    assert len(decoded.faults) == len(files)


async def test_the_order_of_the_files_is_kept(decoder):
    colors = [list(COLORS)[i % 3] for i in range(20)]
    decoded = await decoder.decode([picture(c, 20 + i) for i, c in enumerate(colors)])
    found = [tuple(int(v) for v in image[3, 3]) for image in decoded.images]
    assert found == [COLORS[c] for c in colors]


LARGE_SIDE = 1500  # px: as PNG over HEAVY_PIXELS


def large_png(color: str = "green") -> bytes:
    assert LARGE_SIDE**2 > HEAVY_PIXELS
    return picture(color, LARGE_SIDE)


async def test_large_pictures_are_decoded_like_others(tiny_set):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    decoded = await decoder.decode([large_png(), picture("red"), large_png("blue")])
    assert not decoded.faults
    for image, color in zip(decoded.images, ("green", "red", "blue"), strict=True):
        np.testing.assert_allclose(image[3, 3], COLORS[color], atol=2)


async def test_what_cannot_be_decoded_at_reduced_scale_has_a_lower_limit(tiny_set):
    settings = Settings(model_set=str(tiny_set), max_full_pixels=LARGE_SIDE**2 - 1)
    jpeg = picture("red", LARGE_SIDE, suffix=".jpg")
    decoded = await Decoder(settings).decode([large_png(), jpeg])
    assert decoded.faults[0].code == "too_many_pixels"
    assert "cannot be decoded at reduced scale; then at most 2,249,999" in decoded.faults[0].message
    assert len(decoded.images) == 1


async def test_large_pictures_of_one_request_have_a_limit_together(tiny_set):
    limit = 2 * LARGE_SIDE**2
    settings = Settings(
        model_set=str(tiny_set), max_full_pixels=LARGE_SIDE**2, max_heavy_pixels=limit
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
    assert isinstance(decoder._begin(avif, True), Heavy)  # never on every thread


async def test_in_a_call_of_many_requests_a_large_picture_is_sent_back(tiny_set):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    files = [[picture("red")], [large_png()], [b"text"]]
    parts = [Question(one, None, 60.0, None) for one in files]
    answer = await decode_many(decoder, pack_call(SharedCall(parts, "interactive")))
    photo, large, text = read_decoded(answer)
    assert (len(photo.images), len(text.images), list(text.faults)) == (1, 0, [0])
    assert isinstance(large, HeavyFileError)
    alone = pack_call(SharedCall(parts[1:2], "interactive", is_alone=True))
    (large,) = read_decoded(await decode_many(decoder, alone))
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
