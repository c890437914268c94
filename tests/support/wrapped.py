"""Wraps the paragraphs of Markdown pages that a program writes, as those that people write are."""

import re
import textwrap

WIDTH = 100  # columns of every page, tables and addresses excepted
BLOCKS = re.compile(r"(^```.*?^```$|\n\n+)", re.MULTILINE | re.DOTALL)
NO_PARAGRAPH = re.compile(r"^(?:[|#<>!]|```|[-*] | )", re.MULTILINE)


def wrapped(page: str) -> str:
    """Return a page with its long paragraphs wrapped; lists, tables and code stay as they are."""
    return "".join(
        block if NO_PARAGRAPH.search(block) or not block.strip() else _fill(block)
        for block in BLOCKS.split(page)
    )


def _fill(paragraph: str) -> str:
    if all(len(line) <= WIDTH for line in paragraph.splitlines()):
        return paragraph
    return textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False) + (
        "\n" if paragraph.endswith("\n") else ""
    )
