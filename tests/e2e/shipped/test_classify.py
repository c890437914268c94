"""``tandem classify`` against the real service: files, folders, globs; a table or JSON.

What it says to every kind of answer is in tests/unit/cli/test_classify.py, without a process.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cases import cases
from tests.support.services.live_service import TANDEM, drawn_photo

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three photos in two folders, beside what is no image."""
    (tmp_path / "deep").mkdir()
    for name, seed in (("b.jpg", 4), ("a.JPEG", 3), ("deep/c.jpg", 5)):
        (tmp_path / name).write_bytes(drawn_photo(seed))
    (tmp_path / "notes.txt").write_text("not looked at in a folder")
    return tmp_path


@pytest.fixture
def classify(folder, service_url) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        where = () if "--offline" in arguments else ("--url", service_url)
        command: list[str | Path] = [TANDEM, "classify", *where, *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)

    return run


def rows(done: subprocess.CompletedProcess[str]) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_file_becomes_a_table(classify, photo_label):
    done = classify("a.JPEG")
    assert done.returncode == 0, done.stderr
    assert "a.JPEG" in done.stdout
    assert photo_label in done.stdout
    assert done.stderr == ""


@cases(
    "paths, files",
    (["**/*.jpg"], ["b.jpg", "deep/c.jpg"]),
    (["deep", "b.jpg", "deep/c.jpg"], ["deep/c.jpg", "b.jpg"]),
)
def test_paths_become_lines_of_json_in_order(classify, paths, files):
    done = classify("--json", *paths)
    assert done.returncode == 0, done.stderr
    assert [row["file"] for row in rows(done)] == files
    assert all(row["predictions"][0]["probability"] > 0 for row in rows(done))


def test_one_bad_file_is_named_and_the_others_are_answered(classify):
    done = classify("--json", "a.JPEG", "notes.txt", "b.jpg")
    assert done.returncode == 1
    assert [row.get("error", {}).get("code") for row in rows(done)] == [None, "not_an_image", None]
    assert "1 of 3 failed" in done.stderr
    table = classify("a.JPEG", "notes.txt")
    assert table.returncode == 1
    assert "failed" in table.stdout


def test_nothing_to_send(classify):
    done = classify("*.png")
    assert done.returncode == 2
    assert "*.png" in done.stderr
    assert "Traceback" not in done.stderr


def test_offline_answers_are_the_services(classify, folder):
    """But for what is a request's; batches of other sizes may round otherwise."""
    (folder / "bad.png").write_bytes(b"no image")
    options = ("--json", "--top-k", "3", ".")
    served, here = rows(classify(*options)), rows(classify("--offline", *options))
    assert len(here) == len(served) == 4
    for row, own in zip(served, here, strict=True):
        for name in ("request_id", "timings_ms"):
            row.pop(name, None)
        row.get("error", {}).pop("request_id", None)
        assert probabilities(own) == pytest.approx(probabilities(row), abs=1e-5)
        assert own == row


def probabilities(row: dict) -> list[float]:
    """Take the probabilities out of an answer, and return them in order."""
    lists = [row.get("predictions", [])]
    for member in row.get("members", {}).values():
        lists.append(member["predictions"])
        member.pop("probability")
    return [prediction.pop("probability") for listed in lists for prediction in listed]
