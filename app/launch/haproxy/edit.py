"""An edit of the configuration that Serve writes for its HAProxy, and how to see that it was made.

Serve has no options for what is edited (app/DECISIONS.md), and a ``sed`` expression that matches
nothing says nothing: the service would run without limits, its ports open. So every edit names the
lines of Serve's template that it needs, which are looked up before anything starts, and the lines
that must be in the file after it, which the command looks up before HAProxy starts.
"""

import ast
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Ends each line that is added, with its section: a second edit of the same file finds them again.
MARK = "# tandem"


@dataclass(frozen=True)
class Edit:
    """One change.

    Attributes:
        purpose: what it is for; an error says that this would be missing.
        anchors: regular expressions, each of which must match in Serve's template.
        script: for ``sed -E``.
        lines: whole lines, each of which must be in the edited file once.
        patterns: extended regular expressions, each of which must match one line of it.
        per: if given, there must be as many of each as lines that this expression matches: a part
            of the file that is not always there, or is there several times.
        absent: an extended regular expression that no line may match, but those that match
            ``unless``.

    """

    purpose: str
    anchors: tuple[str, ...]
    script: str
    lines: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    per: str = ""
    absent: str = ""
    unless: str = ""


def appended(
    purpose: str, section: str, lines: Iterable[str], anchor: str | None = None, per: str = ""
) -> Edit:
    """Return the edit that puts lines at the beginning of a section."""
    rows = [f"    {line} {MARK} {section.split()[-1]}" for line in lines]
    # sed takes one of two backslashes.
    place = section.replace(".", r"\.")
    script = "\\\n".join([f"/^{place}$/a", *(row.replace("\\", "\\\\") for row in rows)])
    return Edit(purpose, (anchor or rf"^{section}$",), script, lines=tuple(rows), per=per)


def sed_script(edits: Sequence[Edit]) -> str:
    """Return the script that makes all edits; what an earlier run of it added goes first."""
    return "\n".join([f"/{MARK} [^ ]+$/d", *(edit.script for edit in edits)]) + "\n"


def unanchored(edits: Iterable[Edit], template_module: str) -> list[str]:
    """Return the edits that would find no place in Serve's template, each with what it needs.

    ``template_module`` is the source of the Python module that holds the template.
    """
    template = "\n".join(
        node.value
        for node in ast.walk(ast.parse(template_module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return [
        f"{edit.purpose} (no line {anchor})"
        for edit in edits
        for anchor in edit.anchors
        if not re.search(anchor, template, re.MULTILINE)
    ]


def check_script(edits: Iterable[Edit]) -> str:
    """Return the shell commands that call ``missing PURPOSE`` for each edit that ``$1`` lacks."""
    return "\n".join(line for edit in edits for line in _checks(edit)) + "\n"


def _checks(edit: Edit) -> Iterable[str]:
    missing = f"missing {shlex.quote(edit.purpose)}"
    if edit.per:
        yield f'num=$(grep -c -E -e {shlex.quote(edit.per)} "$1")'
    # One process for all lines of an edit: it runs whenever Serve reloads HAProxy.
    sought = [("-xF", edit.lines)] if edit.lines else []
    for how, which in [*sought, *(("-E", (pattern,)) for pattern in edit.patterns)]:
        words = " ".join(f"-e {shlex.quote(one)}" for one in which)
        expected = f"$((num * {len(which)}))" if edit.per else len(which)
        yield f'[ "$(grep -c {how} {words} "$1")" -eq {expected} ] || {missing}'
    if edit.absent:
        found = f'grep -E -e {shlex.quote(edit.absent)} "$1"'
        if edit.unless:
            found += f" | grep -v -E -e {shlex.quote(edit.unless)}"
        yield f'[ -z "$({found})" ] || {missing}'
