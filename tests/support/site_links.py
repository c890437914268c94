"""Hooks of MkDocs: the guide on sets is a page, and links that leave the site become paths."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]*)\]\((\.\.?/[^)#\s]*)(#[^)\s]*)?\)")
CODE = re.compile(r"`[^`\n]+`")
# Pages of the site by files elsewhere in the repository.
PAGES = {"sets.md": ROOT / "calibration" / "README.md"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=path.read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with links that leave the site as text; one that leads nowhere stays a link.

    GitHub wants a bar in a table's code escaped, and MkDocs would show the backslash.
    """
    name = page.file.src_uri
    folder = PAGES.get(name, ROOT / "docs" / name).parent
    depth = name.count("/")
    linked = LINK.sub(lambda link: _inside(link, folder, depth), markdown)
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), linked)


def _inside(link: re.Match[str], folder: Path, depth: int) -> str:
    text, target = link[1], (folder / link[2]).resolve()
    for name, page in PAGES.items():
        if target == page:
            return f"[{text}]({'../' * depth}{name}{link[3] or ''})"
    if target.is_relative_to(ROOT / "docs") and folder.is_relative_to(ROOT / "docs"):
        return link[0]  # MkDocs checks it
    if target.is_relative_to(ROOT / "docs"):
        return f"[{text}]({target.relative_to(ROOT / 'docs')}{link[3] or ''})"
    if not target.exists():
        return link[0]
    path = f"`{target.relative_to(ROOT)}`"
    return path if text.strip("`") in path else f"{text} ({path})"
