"""The pages of docs/ that people write: short sentences, plain words, options that exist."""

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from app.settings import Settings
from tests.support import readability
from tests.support.command_line import options_of

ROOT = Path(__file__).parents[3]
WRITTEN = sorted(
    [
        ROOT / "docs/index.md",
        *(ROOT / "docs/tutorial").glob("*.md"),
        *(ROOT / "docs/how-to").glob("*.md"),
        ROOT / ".github/SECURITY.md",
        ROOT / ".github/CODE_OF_CONDUCT.md",
    ]
)
COMMAND = re.compile(r"^\S*\btandem (serve|classify|plan|evaluate|quantize|trace)\b([^#\n]*)", re.M)
GLUE = re.compile(r"\b(what is|such|told|so many|beside which|whatsoever|and so on|etc\.)\b", re.I)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_sentences_are_short(page: Path):
    lengths = readability.lengths(page.read_text("utf-8"))
    assert statistics.median(lengths) <= readability.GOAL_MEDIAN
    assert readability.percentile(lengths, 0.9) <= readability.GOAL_P90
    assert max(lengths) <= 35


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_words_are_plain(page: Path):
    assert GLUE.findall(page.read_text("utf-8")) == []


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_options_and_settings_that_are_named_exist(page: Path):
    text = page.read_text("utf-8")
    for command, arguments in COMMAND.findall(text):
        assert set(re.findall(r"--[a-z0-9-]+", arguments)) <= options_of(command), arguments
    rows = re.findall(r"^\| `([a-z_]+)` \|", text, re.M)
    assert {name for name in rows if "_" in name} <= set(Settings.model_fields)


def test_the_site_is_built_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / ".mkdocs.yml"]
    built = subprocess.run([*command, "-d", tmp_path], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "index.html").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One two three. Four five.", [3, 2]),
        ("# A title is not counted\n\nOne two\nthree.", [3]),
        ("- one two\n- three", [2, 1]),
        ("See [the page](https://a.example/b.html) now.", [4]),
        ("One `a b` two:\n\n```sh\nnot this\n```\n\nThree.", [4, 1]),
        ("| a | b |\n| --- | --- |\n\nOne.", [1]),
        ("With version 3.11 of e.g. that.", [6]),
    ],
)
def test_the_words_of_sentences_are_counted(text: str, expected: list[int]):
    assert readability.lengths(text) == expected


def test_a_percentile_is_a_value_of_the_list():
    assert readability.percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9) == 9
    assert readability.percentile([7], 0.9) == 7
