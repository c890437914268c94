"""docs/decisions: a page for each decision, and whoever names a decision names one that exists."""

import re
import statistics
import subprocess

import pytest

from tests.support import decisions, readability
from tests.support.cases import cases

ROOT = decisions.ROOT
PAGES = decisions.pages()
SECTIONS = ["Context", "Choice", "Measured", "What would change it"]
NAMED = re.compile(r"\bdecisions?\s(\d{4})\b|\bdecisions/(\d{4}-[\w-]+\.md)")
TEXT = ("*.py", "*.md", "*.yaml", "*.yml", "*.toml", "*.sh", "*.html", "Makefile")
MAX_WORDS = 300  # of a page, without its tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short_and_has_its_sections_in_order(page):
    assert re.fullmatch(rf"{decisions.Decision.read(page).number}-[a-z0-9-]+\.md", page.name)
    text = page.read_text("utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == SECTIONS
    assert all(part.strip() for part in re.split(r"^## .+$", text, flags=re.M)[1:])
    prose = re.sub(r"^\|.*\n", "", text, flags=re.M)
    assert len(prose.split()) <= MAX_WORDS
    assert readability.GLUE.findall(prose) == []
    lengths = readability.lengths(prose)
    assert statistics.median(lengths) <= readability.GOAL_MEDIAN
    assert readability.percentile(lengths, 0.9) <= readability.GOAL_P90


def test_numbers_have_no_gap_and_superseding_ones_are_accepted():
    numbers = [page.name[:4] for page in PAGES]
    assert numbers == [f"{number:04d}" for number in range(1, len(PAGES) + 1)]
    status = {d.number: d.status for d in map(decisions.Decision.read, PAGES)}
    later = {s.removeprefix("superseded by ") for s in status.values() if s.startswith("super")}
    assert {number: status.get(number) for number in later} == dict.fromkeys(later, "accepted")


@cases("text", "# 1 No\n", "# 0001 A\n\nStatus: maybe\n\nPackage: app\n\n## Context\n")
def test_a_page_with_another_head_is_refused(text, tmp_path):
    (tmp_path / "0001-a.md").write_text(text)
    with pytest.raises(ValueError, match=r"0001-a\.md must begin with"):
        decisions.Decision.read(tmp_path / "0001-a.md")


def test_the_table_of_decisions_is_that_of_the_pages():
    index = decisions.INDEX.read_text("utf-8")
    assert index == decisions.index(), "run make reference, and commit what it writes"


def test_every_decision_that_is_named_exists():
    command = ["git", "ls-files", "-co", "--exclude-standard", *TEXT]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    known = {name for page in PAGES for name in (page.name, page.name[:4])}
    seen = {
        (name, number or file)
        for name in listed.stdout.splitlines()
        if (ROOT / name).exists() and name != "tests/unit/docs/test_decisions.py"
        for number, file in NAMED.findall((ROOT / name).read_text("utf-8"))
    }
    assert len({name for name, _ in seen if not name.startswith("docs/")}) >= 10
    assert {(name, decision) for name, decision in seen if decision not in known} == set()
