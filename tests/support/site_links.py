"""A hook of MkDocs: a link from docs/ to a file elsewhere in the repository becomes its path."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]*)\]\((\.\.?/[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with links that leave docs/ as text; one that leads nowhere stays a link."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    return LINK.sub(lambda link: _inside(link, folder), markdown)


def _inside(link: re.Match[str], folder: Path) -> str:
    text, target = link[1], (folder / link[2]).resolve()
    if target.is_relative_to(ROOT / "docs") or not target.exists():
        return link[0]  # MkDocs checks it
    path = f"`{target.relative_to(ROOT)}`"
    return path if text.strip("`") in path else f"{text} ({path})"
