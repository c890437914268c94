"""The service's rung when the service, or a photo, goes away: an error of that rung alone."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from calibration.ladder import service as module
from calibration.ladder.rung import LABELLED_FILES, LadderError, RungResult
from calibration.ladder.service import run_service_rung
from calibration.ladder.store import Store
from tests.support.calibration.ladders import job_of, measured


class Process:
    """A service that is nobody's: it only says that it was stopped."""

    pid = 1
    is_stopped = False

    def interrupt(self, _: float) -> None:
        self.is_stopped = True


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> Any:
    return partial(httpx.Client, transport=httpx.MockTransport(answer))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()

    @contextmanager
    def child(*_: object, **__: object):
        yield process

    monkeypatch.setattr(module, "child", child)
    monkeypatch.setattr(module, "_wait_ready", lambda *_: "")
    monkeypatch.setattr(module, "_measured", lambda *_: measured(5.0).figures)
    return process


def run(folder: Path, work: Path, photos: list[tuple[Path, int]]) -> RungResult:
    job, store = job_of(folder, work), Store(work)
    with store.opened(job.facts, is_resumed=False):
        noted = json.dumps([[str(path), index] for path, index in photos])
        (work / LABELLED_FILES).write_text(noted)
        return run_service_rung(job, store, None)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    path.write_bytes(b"photo")
    return path


def test_top1_is_of_every_photo(tiny_set, tmp_path, photo, process, monkeypatch) -> None:
    body = {"predictions": [{"index": 1}]}
    client = answering(lambda _: httpx.Response(200, json=body))
    monkeypatch.setattr(httpx, "Client", client)
    figures = run(tiny_set, tmp_path / "work", [(photo, 1), (photo, 0)]).figures
    assert figures is not None
    assert (figures.top1, figures.num_labelled) == (0.5, 2)
    assert process.is_stopped


def gone(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("", request=request)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (gone, "not be measured to the end: ConnectError"),
        (lambda _: httpx.Response(413, text="too large"), "photo.jpg: the service answers too l"),
    ],
)
def test_a_service_that_does_not_answer_is_an_error_of_the_rung(
    tiny_set, tmp_path, photo, process, monkeypatch, answer, says
) -> None:
    monkeypatch.setattr(httpx, "Client", answering(answer))
    with pytest.raises(LadderError, match=says):
        run(tiny_set, tmp_path / "work", [(photo, 1)])
    assert process.is_stopped


def test_a_photo_that_was_removed_meanwhile_too(tiny_set, tmp_path, photo, process) -> None:
    photo.unlink()
    with pytest.raises(LadderError, match=r"to the end: .*No such file.*photo\.jpg"):
        run(tiny_set, tmp_path / "work", [(photo, 1)])
    assert process.is_stopped
