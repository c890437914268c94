"""Prints the length of sentences, in words, of every page: make readability."""

import argparse
import json
import math
import re
import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOAL_MEDIAN, GOAL_P90 = 18, 30  # words
GLUE = re.compile(r"\b(what is|such|told|so many|beside which|whatsoever|and so on|etc\.)\b", re.I)
FENCED = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"^ *> ?", re.MULTILINE)
NOT_PROSE = re.compile(r"<!--(?s:.*?)-->|^\s*\|.*\|\s*$|^#.*$", re.MULTILINE)
LIST_ITEM = re.compile(r"\n\s*(?:[-*]|\d+\.)\s+")
LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
ENDED = re.compile(r"(?<=[.?!:])[)\"*_]*\s+(?=[\"(*_`A-Z0-9])|\n\s*\n")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    pages = {page: lengths(page.read_text("utf-8")) for page in every_page()}
    figures = {
        str(page.relative_to(ROOT)): {
            "sentences": len(words),
            "median": statistics.median(words),
            "p90": percentile(words, 0.9),
        }
        for page, words in pages.items()
        if words
    }
    if arguments.parse_args().json:
        print(json.dumps(figures, indent=1))
        return
    print(f"goal: median {GOAL_MEDIAN}, p90 {GOAL_P90} words\nmedian  p90  sentences  page")
    for page, row in figures.items():
        is_over = row["median"] > GOAL_MEDIAN or row["p90"] > GOAL_P90
        print(
            f"{row['median']:6.0f} {row['p90']:4.0f} {row['sentences']:10} "
            f" {page}{'  over' if is_over else ''}"
        )


def every_page() -> list[Path]:
    """Return every Markdown page of the repository, without those that a tool writes."""
    return [page for page in markdown_files() if "docs/reference/" not in str(page)]


def markdown_files() -> list[Path]:
    """Return every Markdown file that git has, or has not been told to ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.splitlines()]


def lengths(text: str) -> list[int]:
    """Return the number of words of each sentence of a page's prose; a list's item ends one."""
    prose = NOT_PROSE.sub("\n\n", QUOTED.sub("", FENCED.sub("\n\n", text)))
    sentences = ENDED.split(LIST_ITEM.sub("\n\n", LINK.sub(r"\1", prose)))
    counts = [len(re.findall(r"[\w`'/.,:@=-]*\w[\w`'/.,:@=-]*", s)) for s in sentences if s]
    return [count for count in counts if count]


def percentile(values: list[int], share: float) -> int:
    """Return the least value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * share) - 1]


if __name__ == "__main__":
    main()
