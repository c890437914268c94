"""Writes docs/decisions/index.md, the table of decisions, from the pages beside it.

``python -m tests.support.decisions`` from the project's root, or ``make reference``.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "decisions"
INDEX = FOLDER / "index.md"
PAGE = re.compile(
    r"# (?P<number>\d{4}) (?P<title>.+)\n\n"
    r"Status: (?P<status>accepted|dropped|superseded by \d{4})\n\n"
    r"Package: (?P<package>app|models|calibration|client)\n\n## "
)


@dataclass(frozen=True)
class Decision:
    path: Path
    number: str  # four digits
    title: str
    status: str
    package: str

    @classmethod
    def read(cls, path: Path) -> "Decision":
        """Raise ValueError if the page does not begin as every decision does."""
        if not (head := PAGE.match(path.read_text("utf-8"))):
            raise ValueError(
                f"{path.name} must begin with '# NNNN Title', 'Status: accepted', 'dropped' or"
                " 'superseded by NNNN', and 'Package: ' app, models, calibration or client"
            )
        return cls(path, **head.groupdict())


def pages() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.md") if path != INDEX)


def index() -> str:
    return "\n".join(
        [
            "# Decisions",
            "",
            "<!-- Written by: python -m tests.support.decisions -->",
            "",
            "Each page has the context of a decision, the choice, the figures measured for it, and",
            "what would change it. A superseded or dropped decision stays, so that nobody tries it",
            "again unaware.",
            "",
            "| number | decision | status | package |",
            "| --- | --- | --- | --- |",
            *[
                f"| {d.number} | [{d.title}]({d.path.name}) | {_linked(d.status)} | {d.package} |"
                for d in map(Decision.read, pages())
            ],
            "",
        ]
    )


def _linked(status: str) -> str:
    number = status.removeprefix("superseded by ")
    for path in FOLDER.glob(f"{number}-*.md"):
        return f"superseded by [{number}]({path.name})"
    return status


if __name__ == "__main__":
    INDEX.write_text(index(), "utf-8")
