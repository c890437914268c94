"""Hooks of MkDocs: the guide on sets and the notebook are pages, links elsewhere are paths."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]*)\]\((\.\.?/[^)#\s]*)(#[^)\s]*)?\)")
CODE = re.compile(r"`[^`\n]+`")
# Pages of the site by files elsewhere in the repository.
PAGES = {
    "sets.md": ROOT / "calibration" / "README.md",
    "notebook.md": ROOT / "examples" / "first_photo.ipynb",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for name, path in PAGES.items():
        text = path.read_text("utf-8")
        content = notebook(text) if path.suffix == ".ipynb" else text
        files.append(File.generated(config, name, content=content))
    return files


def notebook(text: str) -> str:
    """Return the cells of a notebook, and what they printed, as Markdown."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            parts.append(f"```text\n{''.join(output['text'])}```")
    return "\n\n".join(parts)


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
