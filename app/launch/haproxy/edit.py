"""Edits of the configuration that Serve writes for its HAProxy, each with a check that it was made.

Serve has no options for these lines (decision 0049). A ``sed`` expression without a match does not
fail: the service would run without limits, with open ports. So every edit names the lines of
Serve's template that it needs, which are checked before anything starts. It also names the lines
that the edited file must have, which the command checks before HAProxy starts.
"""

import ast
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Ends each added line, with the section's name, so that a second run recognises the lines.
MARK = "# tandem"


@dataclass(frozen=True)
class Edit:
    """An edit of HAProxy's configuration.

    Attributes:
        purpose: the protection that would be missing without it; part of error messages.
        anchors: regular expressions, each of which must match in Serve's template.
        script: for ``sed -E``.
        lines: whole lines, each of which must be in the edited file once.
        patterns: extended regular expressions, each of which must match one line of the edited
            file.
        per: if not empty, a regular expression; each line must occur as often as it matches. For
            parts of the file that may be missing or repeated.
        absent: an extended regular expression that only lines matching ``unless`` may match.

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
    # sed removes one of two backslashes.
    place = section.replace(".", r"\.")
    script = "\\\n".join([f"/^{place}$/a", *(row.replace("\\", "\\\\") for row in rows)])
    return Edit(purpose, (anchor or rf"^{section}$",), script, lines=tuple(rows), per=per)


def sed_script(edits: Sequence[Edit]) -> str:
    """Return a script that makes all edits, and first removes the lines of an earlier run."""
    return "\n".join([f"/{MARK} [^ ]+$/d", *(edit.script for edit in edits)]) + "\n"


def unanchored(edits: Iterable[Edit], template_module: str) -> list[str]:
    """Return the edits whose anchors are missing in Serve's template, with those anchors.

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
    """Return shell commands that call ``missing PURPOSE`` for each edit missing in file ``$1``."""
    return "\n".join(line for edit in edits for line in _checks(edit)) + "\n"


def _checks(edit: Edit) -> Iterable[str]:
    missing = f"missing {shlex.quote(edit.purpose)}"
    if edit.per:
        yield f'num=$(grep -c -E -e {shlex.quote(edit.per)} "$1")'
    # One grep process for all lines of an edit, since Serve reloads HAProxy often.
    sought = [("-xF", edit.lines)] if edit.lines else []
    for how, which in [*sought, *(("-E", (pattern,)) for pattern in edit.patterns)]:
        words = " ".join(f"-e {shlex.quote(expression)}" for expression in which)
        expected = f"$((num * {len(which)}))" if edit.per else len(which)
        yield f'[ "$(grep -c {how} {words} "$1")" -eq {expected} ] || {missing}'
    if edit.absent:
        search = f'grep -E -e {shlex.quote(edit.absent)} "$1"'
        if edit.unless:
            search += f" | grep -v -E -e {shlex.quote(edit.unless)}"
        yield f'[ -z "$({search})" ] || {missing}'
