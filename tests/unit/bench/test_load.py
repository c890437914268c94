"""The load generator: arrival times of open loops, and the files that are sent."""

import math
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from app.bench import load
from app.bench.measurement import TimedRequest
from app.errors import ConfigError
from models.image import ImageRule, read_image
from tests.support.cases import cases
from tests.support.image_folder import write_image_folder


def test_arrivals_are_poisson() -> None:
    """Rate, exponential gaps (variance = mean squared) and nothing beyond the end."""
    times = load.poisson_arrivals(200.0, 100.0, seed=1)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 200, rel=0.03)
    assert times[-1] < 100
    # Counts of disjoint seconds: variance equals mean.
    counts = np.bincount(times.astype(int), minlength=100)
    assert counts.var() == pytest.approx(counts.mean(), rel=0.4)


@given(st.floats(0.1, 500), st.floats(0.01, 20), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_arrivals_rise_and_are_the_same_again(rate: float, duration: float, seed: int) -> None:
    times = load.poisson_arrivals(rate, duration, seed)
    assert (np.diff(times) >= 0).all()
    assert ((times >= 0) & (times < duration)).all()
    np.testing.assert_array_equal(times, load.poisson_arrivals(rate, duration, seed))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_or_time_that_is_none_is_refused(bad: float) -> None:
    for rate, duration in ((bad, 1.0), (1.0, bad)):
        with pytest.raises(ConfigError, match="must be a number above 0"):
            load.poisson_arrivals(rate, duration, 0)


def test_more_arrivals_than_can_be_held_are_refused() -> None:
    with pytest.raises(ConfigError, match=str(load.MAX_ARRIVALS)):
        load.poisson_arrivals(1e9, 1e9, 0)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder with pictures and other things."""
    monkeypatch.chdir(tmp_path)
    return write_image_folder(tmp_path)


@pytest.mark.usefixtures("folder")
@cases(
    "paths, expected",
    (["b.jpg"], ["b.jpg"]),
    (["notes.txt"], ["notes.txt"]),  # named: sent as it is, the service judges
    (["sub"], ["sub/c.webp", "sub/deep/d.jpeg"]),
    (["."], ["a.PNG", "b.jpg", "odd[1].jpg", "sub/c.webp", "sub/deep/d.jpeg"]),
    (["*.jpg"], ["b.jpg", "odd[1].jpg"]),
    (["**/*.jpeg"], ["sub/deep/d.jpeg"]),
    (["odd[1].jpg"], ["odd[1].jpg"]),  # the file itself before the glob
    (["b.jpg", "b.jpg", "*.jpg", "sub", "sub/c.webp"], None),
)
def test_files_are_found_once_and_in_order(paths, expected):
    found = [str(path) for path in load.find_files(paths)]
    expected = expected or ["b.jpg", "odd[1].jpg", "sub/c.webp", "sub/deep/d.jpeg"]
    assert found == expected


def test_a_folder_whose_name_ends_like_a_picture_is_no_picture(folder):
    (folder / "sub" / "album.jpg").mkdir()
    assert [p.name for p in load.find_files(["sub"])] == ["c.webp", "d.jpeg"]


@pytest.mark.parametrize("name", ["e.jfif", "e.JPE", "e.jpeg", "e.WebP"])
def test_every_suffix_of_the_three_formats(folder, name):
    (folder / "sub" / "deep" / name).touch()
    assert f"sub/deep/{name}" in [str(path) for path in load.find_files(["sub"])]


@pytest.mark.parametrize("name", ["._b.jpg", ".b.jpg", "__MACOSX/b.jpg", ".cache/b.jpg"])
def test_hidden_files_and_those_of_macos_are_left_out(folder, name):
    hidden = folder / "sub" / name
    hidden.parent.mkdir(exist_ok=True)
    hidden.touch()
    assert [path.name for path in load.find_files(["sub"])] == ["c.webp", "d.jpeg"]
    assert list(load.find_files([f"sub/{name}"])) == [Path("sub") / name]  # named: taken


def test_links_are_followed_once_and_globs_may_be_absolute(folder):
    (folder / "links").mkdir()
    (folder / "links" / "class").symlink_to(folder / "sub")
    files = ["links/class/c.webp", "links/class/deep/d.jpeg"]
    assert [str(path) for path in load.find_files(["links"])] == files
    assert list(load.find_files([f"{folder}/*.jpg"])) == [folder / "b.jpg", folder / "odd[1].jpg"]
    (folder / "sub" / "deep" / "up").symlink_to(folder / "sub")
    (folder / "sub" / "self").symlink_to(folder / "sub" / "self")
    assert [path.name for path in load.find_files(["sub"])] == ["c.webp", "d.jpeg"]


@pytest.mark.parametrize("path", ["missing.jpg", "*.gif", "empty"])
def test_nothing_found_is_said(folder, path):
    (folder / "empty").mkdir()
    with pytest.raises(load.NothingToClassifyError, match=path.replace("*", r"\*")):
        list(load.find_files([path]))


def test_drawn_photos_are_the_same_again_and_decode() -> None:
    first, again = load.drawn_photos(3), load.drawn_photos(3)
    assert (first, len(set(first))) == (again, 3)
    assert all(read_image(body, ImageRule(224, 256)).shape == (224, 224, 3) for body in first)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("loop", ["open", "closed"])
async def test_answers_are_kept_with_their_requests_number_if_asked_for(loop, keeps):
    async def answer(request: web.Request) -> web.Response:
        assert request.query_string == "top_k=1&plan=fast"
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_post("/v1/classify", answer)
    heard: list[TimedRequest] = []
    async with TestServer(app) as server:
        url, bodies = str(server.make_url("")).rstrip("/"), [b"a", b"b"]
        target = load.Target(url, bodies, query="top_k=1&plan=fast", keeps_answers=keeps)
        if loop == "open":
            await load.open_loop(target, [0.0, 0.001, 0.002], heard.append)
        else:
            await load.closed_loop(target, 1, 0.05, heard.append)
    kept = sorted(one.answer for one in heard if one.answer)
    assert {one.error for one in heard} == {None}
    assert kept == [(number, bodies[number % 2]) for number in range(len(heard) * keeps)]
