"""A decoding process for real: the Gateway's own pixels, and whatever dies, nobody hangs."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import psutil
import pytest

from app.decoding import child
from app.decoding import process as module
from app.decoding.process import DecodeProcess, Photo
from app.decoding.slots import NUM_SLOTS
from app.decoding.small import SMALL_BYTES
from app.errors import DecodingDiedError
from models.image import ImageRule
from models.image_inputs import ImageInputs
from tests.support.open_files import open_files
from tests.support.tiny_networks import picture

RULES = (ImageRule(16, 20), ImageRule(24, 24, interpolation="bicubic"))
MAX_PIXELS = 10**6


@pytest.fixture
async def process() -> AsyncIterator[DecodeProcess]:
    process = DecodeProcess(RULES, MAX_PIXELS, MAX_PIXELS)
    process.start()
    await ready(process)
    yield process
    process.close()


async def ready(process: DecodeProcess) -> None:
    async with asyncio.timeout(60):
        while not process.is_ready:
            await asyncio.sleep(0.005)


async def answered(process: DecodeProcess, data: bytes) -> Photo | None:
    future = process.submit(data)
    assert future is not None
    return await asyncio.wait_for(future, 60)


def pid_of(process: DecodeProcess) -> int:
    assert process._child is not None
    return process._child.process.pid


def photo(side: int = 60, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 7, 3), np.uint8)
    return cv2.imencode(".jpg", pixels)[1].tobytes()


async def test_it_makes_the_pixels_that_the_gateway_makes(process):
    inputs = ImageInputs({"small": RULES[0], "large": RULES[1]})
    before = time.monotonic()
    for seed in range(5):
        data = photo(40 + seed, seed)
        decoded = await answered(process, data)
        np.testing.assert_array_equal(decoded.pixels, inputs.read(data))
        assert (decoded.width, decoded.height) == (47 + seed, 40 + seed)
        assert before < decoded.started < decoded.ended < time.monotonic()
    assert 0 < process.cpu_s < 60
    assert process.num_open == 0


async def test_many_at_once_are_all_answered_each_with_its_own(process):
    inputs = ImageInputs({"small": RULES[0], "large": RULES[1]})
    files = [photo(30 + seed, seed) for seed in range(NUM_SLOTS)]
    waiting = [process.submit(data) for data in files]
    assert process.num_open == NUM_SLOTS
    assert process.submit(files[0]) is None  # every slot is taken
    for data, future in zip(files, waiting, strict=True):
        np.testing.assert_array_equal((await future).pixels, inputs.read(data))
    assert (await answered(process, files[0])) is not None


PROGRESSIVE = cv2.imencode(
    ".jpg", np.zeros((30, 30, 3), np.uint8), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]
)[1].tobytes()


@pytest.mark.parametrize(
    "data",
    [b"text", b"", photo()[:200], PROGRESSIVE, picture("red"), picture("red", 1030, ".jpg")],
    ids=["no image", "nothing", "cut off", "progressive", "PNG", "many pixels"],
)
async def test_what_is_no_small_photo_comes_back_undone(process, data):
    assert await answered(process, data) is None
    assert await answered(process, photo()) is not None


async def test_a_file_that_is_too_long_is_not_taken(process):
    assert process.submit(photo() + bytes(SMALL_BYTES)) is None


async def test_it_takes_nothing_before_it_is_ready():
    process = DecodeProcess(RULES, MAX_PIXELS, MAX_PIXELS)
    assert process.submit(photo()) is None
    process.start()
    assert process.submit(photo()) is None
    process.close()


async def test_whoever_went_away_leaves_the_slot_to_others(process):
    for seed in range(3):
        waiting = [process.submit(photo(seed=seed)) for _ in range(NUM_SLOTS)]
        for future in waiting:
            future.cancel()
        async with asyncio.timeout(60):
            while process.num_open:
                await asyncio.sleep(0.005)
    assert await answered(process, photo()) is not None


async def test_of_a_process_that_died_only_the_file_it_died_of_fails(process, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(process, "_pause_s", 0.0)
    ended = []
    process._on_end = lambda: ended.append(process.num_open)
    os.kill(pid_of(process), signal.SIGSTOP)
    of_it, innocent = process.submit(photo()), process.submit(photo())
    assert process._child is not None
    process._child.slots.begin(next(iter(process._waiting)))  # as it does before it decodes
    os.kill(pid_of(process), signal.SIGKILL)
    with pytest.raises(DecodingDiedError, match="the process that decoded this image died"):
        await asyncio.wait_for(of_it, 60)
    assert await asyncio.wait_for(innocent, 60) is None
    assert (process.is_ready, process.num_open, ended) == (False, 0, [0])
    cpu_s = process.cpu_s
    process.start()
    await ready(process)
    assert await answered(process, photo()) is not None
    assert process.cpu_s > cpu_s >= 0


async def test_one_that_dies_again_and_again_is_started_ever_later(process, monkeypatch):
    clock = [time.monotonic()]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    pauses = []
    for _ in range(9):
        os.kill(pid_of(process), signal.SIGKILL)
        async with asyncio.timeout(60):
            while process._child is not None:
                await asyncio.sleep(0.005)
        began = clock[0]
        process.start()
        assert process._child is None  # not yet
        clock[0] = process._may_start_at
        pauses.append(clock[0] - began)
        process.start()
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60])


async def test_one_that_hangs_is_killed(process, monkeypatch):
    process.end_if_hung()  # it has nothing to do
    os.kill(pid_of(process), signal.SIGSTOP)
    future = process.submit(photo())
    process.end_if_hung()  # not long enough
    assert process.is_ready
    monkeypatch.setattr(module, "MAX_RUN_S", -1.0)
    process.end_if_hung()
    assert await asyncio.wait_for(future, 60) is None
    assert not process.is_ready


async def test_it_knows_no_secrets(monkeypatch):
    monkeypatch.setenv("TANDEM_API_KEYS", "a-key")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token")
    process = DecodeProcess(RULES, MAX_PIXELS, MAX_PIXELS)
    process.start()
    await ready(process)
    has = psutil.Process(pid_of(process)).environ()
    assert "PATH" in has
    assert not {"TANDEM_API_KEYS", "RAY_AUTH_TOKEN"} & set(has)
    process.close()


async def test_ctrl_c_is_for_the_gateway(process):
    os.kill(pid_of(process), signal.SIGINT)
    assert await answered(process, photo()) is not None


async def test_closing_ends_it(process):
    pid = pid_of(process)
    future = process.submit(photo())
    process.close()
    assert not psutil.pid_exists(pid)
    assert future.done()


async def test_what_could_not_be_started_leaves_no_file_open(monkeypatch):
    silent = logging.Logger("silent")  # a record would hold the error, and all that was made
    monkeypatch.setattr(module, "logger", silent)
    monkeypatch.setattr(child.sys, "executable", "/nowhere/python")
    before = open_files()
    DecodeProcess(RULES, MAX_PIXELS, MAX_PIXELS).start()
    assert not open_files() - before


async def test_without_a_process_more_threads_go_on(monkeypatch, caplog):
    tried = []

    def refuse(*_: object, **__: object) -> None:
        tried.append(1)
        raise OSError("no process more")

    monkeypatch.setattr(child.subprocess, "Popen", refuse)
    monkeypatch.setattr(module, "logger", logging.getLogger("of this test"))
    process = DecodeProcess(RULES, MAX_PIXELS, MAX_PIXELS)
    process.start()
    process.start()  # not tried again at once
    assert process.submit(photo()) is None
    assert [record.message for record in caplog.records] == [
        "No process to decode photos: no process more; threads do it"
    ]
    assert len(tried) == 1


GATEWAY = """
import asyncio, os, signal
from app.decoding.process import DecodeProcess
from models.image import ImageRule

async def main():
    process = DecodeProcess((ImageRule(16, 20),), 10**6, 10**6)
    process.start()
    while not process.is_ready:
        await asyncio.sleep(0.01)
    print(process._child.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_it_ends_with_its_gateway_however_that_ends():
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", GATEWAY], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, until = int(done.stdout), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)
