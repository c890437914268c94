"""The project's serve_config.yaml with something wrong in it."""

import re
from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "serve_config.yaml"


def edited_config(folder: Path, old: str, new: str) -> Path:
    """Return a copy of the project's serve_config.yaml with one thing changed."""
    text = SHIPPED.read_text("utf-8")
    whole = rf"(?<!\w){re.escape(old)}"  # no part of another key
    assert re.search(whole, text)
    path = folder / SHIPPED.name
    path.write_text(re.sub(whole, new, text, count=1), "utf-8")
    return path
