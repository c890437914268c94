"""Prose, messages and names are free of the words that make a reader guess.

Docstrings have some left: the allowance says how many by package, and only goes down. After mending
run ``python -m tests.support.vocabulary --write``.
"""

import ast
import json

import pytest

from tests.support import vocabulary
from tests.support.cases import cases
from tests.support.vocabulary import ROOT

ALLOWANCE = json.loads(vocabulary.ALLOWANCE.read_text("utf-8"))
CODE = '''
"""What is in a module."""
def told(given, other):
    """Say what is there."""
    found: int = 1
    return [one for one in f"so many {found}"]
'''


def named(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", vocabulary.pages(), ids=named)
def test_a_page_has_none_of_the_words(page):
    assert vocabulary.in_page(page) == []


@pytest.mark.parametrize("in_tree", [vocabulary.in_messages, vocabulary.in_names])
def test_no_message_and_no_name_has_the_words(in_tree) -> None:
    assert [
        f"{named(path)}:{line}: {word}"
        for path, tree in vocabulary.trees().items()
        for line, word in in_tree(tree)
    ] == []


def test_docstrings_have_no_more_of_the_words() -> None:
    counts = vocabulary.docstrings_by_package()
    more = {name: n for name, n in counts.items() if n > ALLOWANCE.get(name, 0)}
    assert more == {}, "python -m tests.support.vocabulary lists them; write plainer"


@cases(
    "text, words",
    ("It says what is there, and so many.", ["what is", "so many"]),
    ("No such file, such as this. Such things.", ["Such"]),
    ('> It was told.\n\nThe list `beside` a "told" word.\n', []),
    ("```sh\necho told\n```\nA table beside it, etc.", ["beside", "etc."]),
    ("Besides, a untold story.", []),
)
def test_words_are_looked_for_in_prose(tmp_path, text, words):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert vocabulary.in_page(page) == words


def test_docstrings_messages_and_names_are_told_apart() -> None:
    tree = ast.parse(CODE.lstrip())
    assert list(vocabulary.in_docstrings(tree)) == [(1, "What is"), (3, "what is")]
    assert list(vocabulary.in_messages(tree)) == [(5, "so many")]
    assert sorted(vocabulary.in_names(tree)) == [
        (2, "given"), (2, "told"), (4, "found"), (5, "one"),
    ]  # fmt: skip
