"""A folder with image files and other things, for what finds files."""

from pathlib import Path

NAMES = ("b.jpg", "a.PNG", "notes.txt", "sub/c.webp", "sub/deep/d.jpeg", "odd[1].jpg")


def write_image_folder(folder: Path) -> Path:
    """Write the files, each of which holds its own name; return ``folder``."""
    for name in NAMES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return folder
