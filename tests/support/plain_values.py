"""An answer of the HTTP interface as its callers have it: what JSON can say."""

import json
from dataclasses import asdict
from typing import Any


def plain(answer: Any) -> Any:
    """Return a dataclass as the values that its JSON holds; fields that are None are left out."""
    return json.loads(json.dumps(_without_none(asdict(answer))))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return list(map(_without_none, value)) if isinstance(value, list) else value
