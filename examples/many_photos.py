"""Classifies a folder with asyncio, a bounded number of photos at a time.

    pip install ./client
    python examples/many_photos.py photos --concurrency 16 > answers.jsonl

Answers are written as they come, one JSON object a line. ``classify_many`` reads a file only when
a request is free for it, so that memory does not grow with the folder.
"""

import argparse
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

from tandem_client import AsyncClient

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
IN_THE_BACKGROUND = 6  # RFC 9218: single photos of other callers go first


def photos(folder: Path) -> Iterator[Path]:
    """Yield the folder's images."""
    yield from (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES)


async def classify(folder: Path, url: str, concurrency: int) -> None:
    """Print an answer or an error for each file."""
    async with AsyncClient(url, timeout=60) as client:
        results = client.classify_many(
            photos(folder),
            concurrency=concurrency,
            ordered=False,
            top_k=1,
            priority=IN_THE_BACKGROUND,
        )
        async for result in results:
            line = {"file": str(result.path)}
            if result.answer:
                line |= {"label": result.answer.label, "probability": result.answer.probability}
            else:
                line |= {"error": str(result.error)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--url", default="http://127.0.0.1:8000")
    arguments.add_argument("--concurrency", type=int, default=16)
    options = arguments.parse_args()
    asyncio.run(classify(options.folder, options.url, options.concurrency))
