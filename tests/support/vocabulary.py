"""Words that prose and names must not have, and where the code still has them.

``python -m tests.support.vocabulary`` prints them as PATH:LINE; ``--write`` lowers the allowance of
tests/unit/docs/vocabulary_allowance.json to what is left, by package.
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import readability

ROOT = Path(__file__).parents[2]
ALLOWANCE = ROOT / "tests/unit/docs/vocabulary_allowance.json"
PACKAGES = ("app", "models", "calibration", "client/tandem_client")
# "No such file" and "such as" are plain English.
WORDS = re.compile(
    r"\b(what is|(?<!no )such(?! as)|told|so many|beside|whatsoever|and so on)\b|\betc\.", re.I
)
NAMES = {"found", "told", "given", "one"}
NOT_PROSE = re.compile(r"^(```|~~~).*?^\1|^>.*?$|`[^`\n]+`|\"[^\"\n]+\"", re.M | re.S)
# Of other rules or nobody's prose: what was, what a tool writes, the decisions' own test.
OTHER_PAGES = ("CHANGELOG.md", "durations.md", "docs/decisions/", "docs/reference/")
Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def pages() -> list[Path]:
    """Return the Markdown pages that people write."""
    every = readability.every_page()
    return [p for p in every if not any(part in str(p.relative_to(ROOT)) for part in OTHER_PAGES)]


def in_page(page: Path) -> list[str]:
    """Return the words in a page's prose: not in code, quotations and quoted words."""
    text = NOT_PROSE.sub(" ", page.read_text("utf-8"))
    return [match.group() for match in WORDS.finditer(text)]


def modules() -> list[Path]:
    every = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in every if "_pb2" not in path.name)


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in modules()}


def in_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of each in a docstring."""
    for constant in _docstrings(tree):
        yield from ((constant.lineno, m.group()) for m in WORDS.finditer(str(constant.value)))


def in_messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of each in a text that is no docstring: what users read."""
    documented = set(map(id, _docstrings(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documented:
            text = node.value if isinstance(node.value, str) else ""
            yield from ((node.lineno, m.group()) for m in WORDS.finditer(text))


def in_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable, argument, field and function."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store(), lineno=line) | ast.arg(arg=name, lineno=line):
                pass
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                name, line = node.name, node.lineno
            case _:
                continue
        if name in NAMES:
            yield line, name


def docstrings_by_package() -> Counter[str]:
    """Count the words in docstrings, by package: app/graph, models, ..."""
    counts: Counter[str] = Counter()
    for path, tree in trees().items():
        package = "/".join(path.parent.relative_to(ROOT).parts[:2])
        counts[package] += len(list(in_docstrings(tree)))
    return +counts


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(node, ast.Module | Defined) and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            yield first.value


def main() -> None:
    if "--write" in sys.argv:
        text = json.dumps(dict(sorted(docstrings_by_package().items())), indent=1)
        ALLOWANCE.write_text(text + "\n", "utf-8")
        return
    for path in modules():
        tree = ast.parse(path.read_text("utf-8"))
        for look in (in_docstrings, in_messages, in_names):
            for line, word in look(tree):
                print(f"{path.relative_to(ROOT)}:{line}: {word} ({look.__name__[3:]})")
    for page in pages():
        for word in in_page(page):
            print(f"{page.relative_to(ROOT)}: {word}")


if __name__ == "__main__":
    main()
