"""The Decoder: good and bad files side by side."""

import asyncio
import threading

import cv2
import numpy as np
import pytest

from app.calls.answer_messages import read_decoded
from app.calls.call_messages import Call, Question, pack_call
from app.compute.health import MAX_RUN_S
from app.compute.inference_threads import InferenceThreads
from app.deployments import assembly
from app.deployments.assembly import assemble
from app.deployments.decoder import HEAVY_PIXELS, MAX_AT_ONCE, SMALL_BYTES, Decoder
from app.deployments.many import decode_many
from app.errors import DeadlineError, HeavyFileError, UnhealthyError
from app.settings import Settings
from models.errors import TooManyPixelsError
from models.image_inputs import ImageInputs
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
    with pytest.raises(TooManyPixelsError, match="send fewer at a time"):
        await decoder.decode([large_png()] * 3)
    async with asyncio.timeout(60):  # what had begun goes on until it has been decoded
        while decoder.queue._heavy_pixels:
            await asyncio.sleep(0.001)
    assert len((await decoder.decode([large_png()] * 2)).images) == 2


async def test_a_photo_does_not_wait_for_large_pictures(tiny_set, monkeypatch):
    """Large ones that never end leave it a thread, however many there are."""
    gate, decode = threading.Event(), cv2.imdecode

    def slow_if_large(data: np.ndarray, flags: int) -> np.ndarray:
        if len(data) == len(large):
            gate.wait(60)
        return decode(data, flags)

    large = large_png()
    monkeypatch.setattr(cv2, "imdecode", slow_if_large)
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    form = asyncio.ensure_future(decoder.decode([large] * 16, 60.0, "bulk"))
    try:
        for _ in range(3):
            async with asyncio.timeout(30):
                assert len((await decoder.decode([picture("red")])).images) == 1
        assert not form.done()
    finally:
        gate.set()
    assert len((await form).images) == 16


async def test_in_a_call_of_many_requests_a_large_picture_is_sent_back(tiny_set):
    decoder = Decoder(Settings(model_set=str(tiny_set)))
    files = [[picture("red")], [large_png()], [b"text"]]
    parts = [Question(one, None, 60.0, None) for one in files]
    answer = await decode_many(decoder, pack_call(Call(parts, "interactive")))
    photo, large, text = read_decoded(answer)
    assert (len(photo.images), len(text.images), list(text.faults)) == (1, 0, [0])
    assert isinstance(large, HeavyFileError)
    alone = pack_call(Call(parts[1:2], "interactive", is_alone=True))
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
    monkeypatch.setattr("models.image_inputs.decode_images", hang)
    decoding = asyncio.ensure_future(graph.own_decoder.decode([picture("red")]))
    try:
        await asyncio.to_thread(begun.wait, 60)
        await graph.check_health()
        clock = graph.own_decoder._health._clock
        graph.own_decoder._health._clock = lambda: clock() + MAX_RUN_S + 1
        with pytest.raises(UnhealthyError, match="a file that is decoded has run for"):
            await graph.check_health()
    finally:
        gate.set()
        decoding.cancel()


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
        await asyncio.gather(*(decoder.decode([photo]) for _ in range(MAX_AT_ONCE + 3)))
    assert used.count(MAIN) == 2 * MAX_AT_ONCE
    assert len(used) == 2 * (MAX_AT_ONCE + 3)


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


@pytest.mark.parametrize(("cores", "uses_loop"), [(1, True), (2, True), (3, False)])
async def test_the_loop_decodes_only_where_it_keeps_up_with_the_cores(
    tiny_set, monkeypatch, cores, uses_loop
):
    threads = InferenceThreads(cores)
    monkeypatch.setattr(assembly, "replica_inference_threads", lambda _: threads)
    graph = assemble(Settings(model_set=str(tiny_set)))
    assert graph.own_decoder is not None
    used = threads_used(monkeypatch)
    await graph.own_decoder.decode([picture("red", suffix=".jpg")])
    assert (used == [MAIN]) is uses_loop
    for member in graph.own_members:  # a queue of more than fills the cores' batches
        monkeypatch.setattr(type(member), "num_waiting", 1000)
    await graph.own_decoder.decode([picture("red", suffix=".jpg")])
    assert used[-1] != MAIN
