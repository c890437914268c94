"""Prints random functions of the packages, to read them as somebody who does not know the code.

``python -m tests.support.function_sample SEED`` draws the functions and methods.
"""

import argparse
import ast
import random
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "models", "calibration")
SIZE = 60


def main() -> None:
    """Print the functions that the seed draws, with their source."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("seed", type=int)
    drawn = random.Random(arguments.parse_args().seed).sample(functions(), SIZE)
    for number, (place, source) in enumerate(drawn, start=1):
        print(f"{number}. {place}\n{source}\n")


def functions() -> list[tuple[str, str]]:
    """Return the place and source of every function and method, without generated files."""
    drawable = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" in path.name:
                continue
            text = path.read_text("utf-8")
            drawable += [
                (
                    f"{path.relative_to(ROOT)}:{node.lineno}",
                    ast.get_source_segment(text, node) or "",
                )
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
    return drawable


if __name__ == "__main__":
    main()
