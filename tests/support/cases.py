"""A table of cases for a test: ``@cases("body, status", (b"", 400), (b"image", 200))``."""

from typing import Any

import pytest


def cases(names: str, *rows: Any, **options: Any) -> pytest.MarkDecorator:
    """Return ``pytest.mark.parametrize`` of these rows, with its own options, as ``ids``."""
    return pytest.mark.parametrize(names, rows, **options)
