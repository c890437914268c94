"""Spoils bytes, texts and trees at random, by a seeded generator."""

import copy
from random import Random
from typing import Any

STEPS = (1, 1, 1, 2, 4)  # that one mutation takes


def spoilt_bytes(rng: Random, data: bytes, tokens: list[bytes], reach: int | None = None) -> bytes:
    """Flip, cut, double, move or replace a few pieces of the first ``reach`` bytes."""
    spoilt = bytearray(data)
    for _ in range(rng.choice(STEPS)):
        end = min(len(spoilt), reach or len(spoilt))
        at = rng.randrange(end + 1)
        piece = spoilt[at : at + rng.choice((1, 2, 4, 12, 200))]
        match rng.randrange(6):
            case 0 if at < end:
                spoilt[at] ^= 1 << rng.randrange(8)
            case 1:
                del spoilt[at : at + len(piece)]
            case 2:
                spoilt[at:at] = piece * rng.choice((1, 2, 50))
            case 3:
                spoilt[at : at + rng.choice((0, len(piece)))] = rng.choice(tokens)
            case 4:
                spoilt[rng.randrange(end + 1) : 0] = piece
            case _:
                spoilt[at : at + len(piece)] = rng.randbytes(len(piece))
    return bytes(spoilt)


def spoilt_tree(rng: Random, tree: Any, values: list[Any]) -> Any:
    """Replace, remove, rename or nest a few nodes of mappings and lists."""
    spoilt = copy.deepcopy(tree)
    for _ in range(rng.choice(STEPS)):
        holder, key = rng.choice(list(_places(spoilt)))
        match rng.randrange(5):
            case 0:
                del holder[key]
            case 1:
                holder[key] = [holder[key]]
            case 2 if isinstance(holder, dict):
                holder[str(rng.choice(values))] = holder.pop(key)
            case 3:
                other, place = rng.choice(list(_places(tree)))
                holder[key] = copy.deepcopy(other[place])
            case _:
                holder[key] = copy.deepcopy(rng.choice(values))
        if not list(_places(spoilt)):
            break
    return spoilt


def _places(tree: Any) -> Any:
    """Yield (mapping or list, key or index) of every node."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)
