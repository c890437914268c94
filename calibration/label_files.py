"""Reads the names of a network's classes from the forms of files that people have.

These are lines with or without numbers and synsets, tables with a header, JSON, YAML, Python
literals and TensorFlow's ``pbtxt``. What can be read in two ways is refused, with both shown.
"""

import ast
import csv
import json
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from models.errors import ModelSetError, reading
from models.model_set import number_of
from models.record import YamlError, parse_yaml

MAX_BYTES = 4 << 20
MAX_LENGTH = 1000  # characters of a name
MAX_NOTES = 3  # of names that several classes have
INSTEAD = "write one name a line in the network's order, or a JSON list of names"
# 0 cat, 0: cat, 0,cat, 0. cat, [0] cat; cat 0, cat: 0; n02123045 cat, /m/01yrx cat
SIGN = r"\s*(?:[-=]>|[:,;=|])\s*"
FRONT = re.compile(rf"[\[(\"']?([-+]?\d{{1,9}})[\])\"']?({SIGN}|\s*[.)-]\s+|\s+)(\S.*)")
BACK = re.compile(rf"(.*?\S)({SIGN}|\s+)[\"']?([-+]?\d{{1,9}})[\"']?")
SYNSET = re.compile(r"(n\d{8}|/[mgt]/\w+)(?:[\s,:;=|]+(\S.*))?")
COUNTED = re.compile(r"(#|//)\d")
BULLET = re.compile(r"-\s+(\S.*)")
LITERAL = re.compile(r"\{|[\[(](?!\d+[\])][ \t])\s*[\"'\d\[{(\])]")  # not [0] cat, not [cat]
QUOTED = re.compile(r"([\"'])((?:(?!\1).|\1\1)*)\1,?")
STRING = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
ITEM = re.compile(rf"item\s*:?\s*\{{((?:[^{{}}\"']|{STRING})*)\}},?")
FIELD = re.compile(rf"(\w+)\s*:\s*({STRING}|-?\d+)")
OF_NUMBERS = ("index", "idx", "id", "number", "num", "no", "target", "classindex", "classidx",
              "classid", "labelid", "labelindex", "categoryid", "class", "label")  # fmt: skip
ONLY_NUMBERS = OF_NUMBERS[:-2]  # the others may be names
OF_NAMES = ("name", "label", "class", "classname", "labelname", "category", "categoryname",
            "displayname", "description", "text", "names", "labels", "classes")  # fmt: skip
INNER = ("id2label", "label2id", "names", "classes", "labels", "label_names", "class_names",
         "categories", "vocab")  # fmt: skip
DESCRIPTIONS = "label_descriptions"  # timm's, by the label_names
YAML = (".yaml", ".yml")  # as Ultralytics' data.yaml
BACKGROUND = ("background", "dummy")  # ImageNet's 1,001st class, which has no synset
OF_IDS = ("synset", "synsetid", "wnid", "wordnetid", "mid", "uid")

Readings = Sequence[tuple[Sequence[Any], Sequence[str]]]  # numbers and names, read in several ways


@dataclass(frozen=True)
class ClassNames:
    """The names of classes: in the network's order, or as a file has them with their numbers.

    Attributes:
        ids: the synsets that stand with the names, in the same order; None without any.
        notes: how the file was read, where it is more than a name a line.
        numbers: the place of each name; None: their own order is the network's.
        is_lines: whether that is the order of plain lines.
    """

    names: Sequence[str]
    ids: Sequence[str] | None = None
    notes: tuple[str, ...] = ()
    numbers: Sequence[int] | None = None
    is_lines: bool = False


def read_class_names(path: Path) -> ClassNames:
    """Read a file of labels or class ids.

    Raises:
        ModelSetError: it cannot be read, is of no known form, or nothing tells its order.
    """
    with reading(path), path.open("rb") as opened:
        return class_names_of(text_of(opened.read(MAX_BYTES + 1), path), path)


def class_names_of(text: str, path: Path) -> ClassNames:
    """Read class names from the text of ``path``, which errors name; raise as above."""
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    body = re.sub(
        r"\A(export default\s+|(\w+\s+)?[\w.]+\s*=\s*)(?=[\[{(])", "", "\n".join(lines).strip()
    ).rstrip(";")
    value = _yaml(text, path) if path.suffix.lower() in YAML else None
    if isinstance(value, dict | list):
        rows = _of_value(value, path)
    elif LITERAL.match(body):
        rows = _of_value(_literal(body, path), path)
    elif ITEM.match(body):
        rows = _of_items(body, path)
    elif re.match(r"(?i)<(!|\?xml|html)|\w+\s*\{", body):
        _refuse(path, "is XML, HTML or a protobuf text without item { id: 0 name: 'cat' }")
    else:
        rows = _of_lines(text.split("\n"), path)
    return _checked(rows, path)


def _refuse(path: Path, problem: str, instead: str = INSTEAD) -> NoReturn:
    raise ModelSetError(f"{path} {problem}; {instead}")


def text_of(data: bytes, path: Path) -> str:
    """Return the text of a file's bytes, its lines with LF; they may end in LF, CR or both."""
    if len(data) > MAX_BYTES:
        _refuse(path, f"is larger than {MAX_BYTES >> 20} MiB, so no list of class names")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        _refuse(path, "is UTF-16", "save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelSetError(f"{path} is not UTF-8: {error}; save it as UTF-8") from error
    if "\0" in text:
        _refuse(path, "is no text: it has zero bytes")
    return re.sub(r"\r*\n|\r", "\n", text)


def _yaml(text: str, path: Path) -> Any:
    try:
        return parse_yaml(text, str(path))
    except YamlError as error:
        raise ModelSetError(f"{error}; {INSTEAD}") from error


def _literal(text: str, path: Path) -> Any:
    """Return the value of JSON or of a Python literal, in which no key stands twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if doubled := _doubled([key for key, _ in pairs]):
            _refuse(path, f"has the key {doubled[0]!r} twice")
        return dict(pairs)

    try:
        try:
            return json.loads(text, object_pairs_hook=once)
        except ValueError:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes
                tree = ast.parse(text, mode="eval")
            for node in ast.walk(tree):
                if isinstance(node, ast.Dict):
                    once([(ast.unparse(key), None) for key in node.keys if key])
            return ast.literal_eval(tree)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        if len(lines) > 1 and all(line.startswith("{") and line.endswith("}") for line in lines):
            return [_literal(line, path) for line in lines]  # JSON Lines
        _refuse(path, f"looks like JSON or a Python literal and cannot be read as one: {error}")


def _of_value(value: Any, path: Path) -> ClassNames:
    """Read a list of names, or a dictionary of numbers and names, either way round."""
    if isinstance(value, dict):  # Hugging Face's config.json
        inner = {key: own for key in INNER if isinstance(own := value.get(key), dict | list)}
        rows = [_checked(_of_value(own, path), path) for own in inner.values()]
        if any(other.names != rows[0].names for other in rows[1:]):
            _refuse(path, f"has {' and '.join(inner)}, which differ")
        if rows:
            return _described(rows[0], value.get(DESCRIPTIONS))
    items = list(value) if isinstance(value, list | tuple) else []
    if items and all(map(_is_name, items)):
        return ClassNames([str(item) for item in items])
    if len(items) > 1 and all(isinstance(item, dict) for item in items):
        return _of_objects(items, path)
    pairs = items or (list(value.items()) if isinstance(value, dict) else [])
    if pairs and all(_is_pair(pair) and _is_pair(pair[1]) for pair in pairs):
        ids, names = ([str(own[place]) for _, own in pairs] for place in (0, 1))
        if _all_match(SYNSET, names) and not _all_match(SYNSET, ids):
            ids, names = names, ids
        pairs = [(number, name) for (number, _), name in zip(pairs, names, strict=True)]
        if _are_numbers([n for n, _ in pairs]):  # Keras'
            return replace(_of_pairs(pairs, path), ids=ids)
    if not pairs or not all(_is_pair(p) and all(map(_is_name, p)) for p in pairs):
        _refuse(path, "holds neither a list of names nor numbers and names")
    return _of_pairs(pairs, path)


def _described(rows: ClassNames, descriptions: Any) -> ClassNames:
    """Return names with their descriptions by the same names, which become the ids."""
    if not isinstance(descriptions, dict) or not all(
        isinstance(descriptions.get(name), str) for name in rows.names
    ):
        return rows
    return replace(rows, names=[descriptions[name] for name in rows.names], ids=rows.names)


def _of_objects(items: Sequence[dict[str, Any]], path: Path) -> ClassNames:
    """Read objects of a number and a name each, as COCO's categories."""
    known = {*OF_NUMBERS, *OF_NAMES, *OF_IDS}
    keys = [key for key in items[0] if re.sub(r"[\W_]", "", str(key)).lower() in known]
    if not keys or not all(_is_name(item.get(key)) for item in items for key in keys):
        _refuse(path, "has objects without a number and a name each, as id and name")
    words = [re.sub(r"[\W_]", "", str(key)).lower() for key in keys]
    columns = [tuple(str(item[key]) for item in items) for key in keys]
    rows = _of_columns(words, columns, path, is_known=True)
    assert rows is not None  # known columns are read, or refused
    return replace(rows, is_lines=False)


def _of_pairs(pairs: Sequence[Sequence[Any]], path: Path) -> ClassNames:
    firsts, seconds = ([str(pair[place]) for pair in pairs] for place in (0, 1))
    both = ((firsts, seconds), (seconds, firsts))
    if readings := [(numbers, names) for numbers, names in both if _are_numbers(numbers)]:
        return _chosen(readings, path)
    _refuse(path, "has names without numbers")


def _is_name(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(re.fullmatch(r"[-+]?\d{1,9}", str(value)) for value in values)


def _of_items(text: str, path: Path) -> ClassNames:
    """Read TensorFlow's label map: ``item { id: 1 name: 'cat' }``."""
    if rest := ITEM.sub("", text).strip():
        _refuse(path, f"is a label map with something between its items: {rest[:40]!r}")
    bare = [re.sub(rf"({STRING})|#[^\n]*", r"\1", body) for body in ITEM.findall(text)]
    items = [FIELD.findall(body) for body in bare]
    if any(_doubled([key for key, _ in item]) for item in items):
        _refuse(path, "is a label map with an item that has a field twice")
    fields = [{key: _literal(value, path) for key, value in item} for item in items]
    what = "display_name" if all("display_name" in item for item in fields) else "name"
    if not all(what in item and isinstance(item.get("id"), int) for item in fields):
        _refuse(path, "is a label map with an item that lacks id or name")
    ids = [str(item["name"]) for item in fields if what != "name" and "name" in item]
    names, numbers = [str(item[what]) for item in fields], [item["id"] for item in fields]
    chosen = _chosen([(numbers, names)], path)
    return replace(chosen, ids=ids if len(ids) == len(names) else None)


def _of_lines(lines: list[str], path: Path) -> ClassNames:
    """Read lines: names, perhaps with numbers or synsets, or a table with a header."""
    hashed = [line.strip() for line in lines if re.match(r"\s*(#|//)\w", line)]
    are_names = len(hashed) == len([line for line in lines if line.strip()])
    kept = [line.strip() for line in lines if are_names or not re.match(r"\s*(#|//)", line)]
    num_comments = len(lines) - len(kept)
    notes = (f"{num_comments} lines of comments left out",) if num_comments else ()
    text = "\n".join(kept).strip("\n").split("\n")
    lines = [line for line in text if line]
    if not lines:
        _refuse(path, "names no class")
    if any(re.search(r"\s#\s", line) for line in lines):
        _refuse(path, "has lines with # inside: the name goes on, or a comment begins")
    if (rows := _of_table(lines, path)) is None:
        if all(line.endswith(",") for line in lines[:-1]):  # a dictionary without its braces
            lines = [line.removesuffix(",").rstrip() for line in lines]
        rows = _of_names(_unquoted(lines, are_all=True), path)
        if rows.is_lines and not all(text):
            before = text[text.index("") - 1]
            _refuse(path, f"has an empty line behind {before!r}: a class without a name, or none?")
        if rows.numbers is not None:
            rows = replace(rows, names=_unquoted(rows.names))
    doubtful = hashed if rows.is_lines else [line for line in hashed if COUNTED.match(line)]
    if doubtful and not are_names:
        line = doubtful[0]
        _refuse(
            path,
            f"has the line {line[:40]!r}, which is a class or a comment",
            "put a blank behind the sign of a comment; names that begin so go into a JSON list",
        )
    return replace(rows, notes=(*notes, *rows.notes))


def _of_names(lines: Sequence[str], path: Path) -> ClassNames:
    """Read lines without comments: numbers before or behind the names, perhaps behind synsets."""
    if bullets := _all_match(BULLET, lines):
        lines = [match[1] for match in bullets]
    synsets = [SYNSET.fullmatch(line) for line in lines]
    without = [line for line, match in zip(lines, synsets, strict=True) if match is None]
    is_background = len(without) == 1 < len(lines) and without[0].lower() in BACKGROUND
    if without and not is_background:
        return _numbered(lines, path) or ClassNames(lines, is_lines=True)
    ids, names = ([m[n] if m else without[0] for m in synsets] for n in (1, 2))
    if not any(match[2] for match in synsets if match):
        return ClassNames(ids)
    if not all(names):
        _refuse(path, "has a synset without a name behind it")
    if _are_numbers(names):
        return _chosen([(names, ids)], path)
    return replace(_numbered(names, path) or ClassNames(names), ids=ids)


def _all_match(pattern: re.Pattern[str], lines: Sequence[str]) -> list[re.Match[str]] | None:
    matches = [match for line in lines if (match := pattern.fullmatch(line))]
    return matches if len(matches) == len(lines) else None


def _numbered(lines: Sequence[str], path: Path) -> ClassNames | None:
    """Read a number before or behind each name; None if the names have none."""
    front, back = _all_match(FRONT, lines), _all_match(BACK, lines)
    readings = list[tuple[Sequence[str], list[str]]]()
    if front:
        readings.append(([m[1] for m in front], [m[3] for m in front]))
    else:
        _check_none(FRONT, lines, path)
        _check_none(SYNSET, lines, path)
    if back:
        numbers, names = [m[3] for m in back], [m[1] for m in back]
        is_count = _places(numbers) is not None and (front or len({*names}) == len(names))
        if is_count or not (front or any(m[2].isspace() for m in back)):
            readings.append((numbers, names))
    # 1 o'clock, 2 o'clock: the number is a part of the name.
    readings = [(n, names) for n, names in readings if 2 * len(set(names)) > len(names)]
    if front and len(readings) > 1 and _places(readings[0][0]) is None:
        del readings[1]
    return _chosen(readings, path) if readings else None


def _check_none(pattern: re.Pattern[str], lines: Sequence[str], path: Path) -> None:
    """Raise if most of the lines begin so, or those that do count the lines."""
    some = [(n, match[1]) for n, line in enumerate(lines) if (match := pattern.fullmatch(line))]
    numbers = [number_of(text) or 0 for _, text in some]
    is_most = 2 * len(some) > len(lines) and max(numbers) <= len(lines)  # 747 counts no classes
    starts = {number - n for number, (n, _) in zip(numbers, some, strict=True)}
    if is_most or (len(some) > 1 and starts in ({0}, {1})):
        without = next(line for line in lines if not pattern.fullmatch(line))
        first = lines[some[0][0]]
        _refuse(path, f"begins some names as {first[:40]!r}, and others as {without[:40]!r}")


def _of_table(lines: list[str], path: Path) -> ClassNames | None:
    """Read a table whose first line names the columns; None if there is no such line."""
    head, is_csv = lines[0], path.suffix.lower() in (".csv", ".tsv")
    sign = next((sign for sign in "\t;,|:" if sign in head), None)
    words = [re.sub(r"[\W_]", "", cell).lower() for cell in head.split(sign)]
    width, is_known = len(words), {*words} <= {*OF_NUMBERS, *OF_NAMES, *OF_IDS}
    if not (is_known or (is_csv and width > 1)) or len(lines) < 2:
        return None
    if width == 1:
        if not is_csv:
            _refuse(path, f"begins with {head!r}, a heading or a class", "remove or number it")
        return ClassNames(_unquoted(lines[1:]), notes=(f"without its header, {head}",))
    try:
        if sign is None:
            cut = str.split if words[-1] in OF_NAMES else str.rsplit  # a name may have blanks
            rows = [cut(line, None, width - 1) for line in lines]
        else:
            rows = list(csv.reader(lines, delimiter=sign, skipinitialspace=True, strict=True))
    except csv.Error as error:
        _refuse(path, f"is no table: {error}")
    uneven = next((n for n, row in enumerate(rows, 1) if len(row) != width), None)
    if uneven is None:
        columns = list(zip(*([cell.strip() for cell in row] for row in rows[1:]), strict=True))
        return _of_columns(words, columns, path, is_known)
    if is_known:
        _refuse(path, f"has {width} columns, and another number in line {uneven}", "quote names")
    return None


def _of_columns(
    words: list[str], columns: list[tuple[str, ...]], path: Path, is_known: bool
) -> ClassNames | None:
    """Choose the columns of numbers, ids and names by their cells, then by their headers."""
    places = range(len(words))
    numeric = [place for place in places if _are_numbers(columns[place])]
    if not is_known and (not numeric or any(number_of(word) is not None for word in words)):
        ends = columns[0], columns[-1]
        if not any(_are_numbers(end) or _all_match(SYNSET, end) for end in ends):
            _refuse(path, "has no header that says which column is the name", "add one: index,name")
        return None  # no header
    synsets = [place for place in places if _all_match(SYNSET, columns[place])]

    def of_words(among: Sequence[int], wanted: Sequence[str]) -> int | None:
        by = (place for word in wanted for place in among if words[place] == word)
        return next(by, among[0] if len(among) == 1 else None)

    taken = (*numeric, *synsets)
    counts = [place for place in places if words[place] in ONLY_NUMBERS]
    if lost := next((words[place] for place in counts if place not in taken), None):
        _refuse(
            path, f"has no whole number in some row of its column {lost}", "write 0, 1, 2 there"
        )
    number = of_words(numeric, OF_NUMBERS)
    texts = [place for place in places if place not in (*numeric, *synsets)]
    name = of_words(texts or [p for p in synsets or numeric if p != number], OF_NAMES)
    if name is None or (numeric and number is None):
        _refuse(path, f"has the columns {', '.join(words)}: which is the name is unclear")
    rows = ClassNames(columns[name], is_lines=True)
    if number is not None:
        others = [place for place in counts if place in numeric and place not in (number, name)]
        of_all = [columns[number], *(columns[place] for place in others if _places(columns[place]))]
        rows = _chosen([(column, columns[name]) for column in of_all], path)
    id_ = next((place for place in synsets if place != name), None)
    notes = (*rows.notes, f"names are in its column {words[name]}")
    return replace(rows, ids=None if id_ is None else columns[id_], notes=notes)


def _unquoted(names: Sequence[str], *, are_all: bool = False) -> list[str]:
    """Remove quotes around names; with ``are_all`` only if all have them."""
    quoted = [QUOTED.fullmatch(name) for name in names]
    if are_all and not all(quoted):
        return list(names)
    pairs = zip(names, quoted, strict=True)
    return [name if m is None else m[2].replace(m[1] * 2, m[1]) for name, m in pairs]


def _places(numbers: Sequence[Any]) -> list[int] | None:
    """Return the places of numbers that are 0 to n - 1, or 1 to n; None of any others."""
    values = [int(number) for number in numbers]
    first = min(values)
    is_whole = first in (0, 1) and sorted(values) == list(range(first, first + len(values)))
    return [value - first for value in values] if is_whole else None


def _chosen(readings: Readings, path: Path) -> ClassNames:
    """Return the one reading of numbers and names; raise if two differ, or numbers are no count."""
    whole = [(places, names) for numbers, names in readings if (places := _places(numbers))]
    if not whole:
        numbers, names = readings[0]
        values = [int(number) for number in numbers]
        doubled, first = _doubled(values), 0 if 0 in values else 1
        lacks = sorted({*range(first, first + len(values))} - {*values})
        what = f"{doubled[0]} stands twice" if doubled else f"{lacks[0]} is missing"
        _refuse(
            path,
            f"begins as if numbers counted the classes ({numbers[0]} for {names[0]!r}), but {what}",
            "number them from 0 without a gap; where numbers belong to names, write a JSON list",
        )
    shown = [sorted(zip(places, names, strict=True)) for places, names in whole]
    if any(other != shown[0] for other in shown) and any(p != whole[0][0] for p, _ in whole):
        both = " or ".join(f"{names[0]!r} is class {places[0]}" for places, names in whole)
        _refuse(path, f"can be read in two ways: {both}")
    places, names = whole[0]
    numbers = next(numbers for numbers, of in readings if of is names)
    note = f"classes are numbered from {min(map(int, numbers))}"
    return ClassNames(names, notes=(note,), numbers=places)


def _doubled(values: Sequence[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]


def _checked(rows: ClassNames, path: Path) -> ClassNames:
    """Return the names in the order of their numbers; raise if one is no name."""
    names, ids = [name.strip() for name in rows.names], rows.ids
    if ids is None and (synsets := _all_match(SYNSET, names)) and all(m[2] for m in synsets):
        ids, names = [match[1] for match in synsets], [match[2] for match in synsets]
    for name in names:
        if not name or len(name) > MAX_LENGTH or re.search(r"[\n\t\ud800-\udfff]", name):
            _refuse(path, f"has a class {name[:40]!r}: empty, long, or with a tab or line end")
    if rows.is_lines:
        _check_order(names, path)
    if ids is not None and (doubled := _doubled(ids)):
        _refuse(path, f"has the id {doubled[0]} twice")
    notes = [f"{name!r} is the name of several classes" for name in _doubled(names)]
    numbers = rows.numbers or range(len(names))
    order = sorted(range(len(names)), key=numbers.__getitem__)
    sorted_ids = None if ids is None else tuple(ids[place] for place in order)
    if len(notes) > MAX_NOTES:
        notes[MAX_NOTES:] = [f"and so are {len(notes) - MAX_NOTES} more"]
    all_notes = tuple(dict.fromkeys((*rows.notes, *notes)))
    return ClassNames(tuple(names[at] for at in order), sorted_ids, all_notes)


def _check_order(names: Sequence[str], path: Path) -> None:
    """Raise if lines count, and not in their order: 0, 1, 10, 11, 2; c0, c1, c10, c2; 1_a, 0_b.

    Lines that are numbers alone may have an order of their own, if it is not that of text.
    """
    start = re.match(r"\D*", names[0])
    counted = re.compile(rf"{re.escape(start[0] if start else '')}(\d{{1,9}})(?!\d)")
    matches = [match for name in names if (match := counted.match(name))]
    texts = [match[1] for match in matches]
    if len(texts) < len(names) or (places := _places(texts)) is None:
        return
    are_more = any(match.end() < len(match.string) for match in matches)
    if places != sorted(places) and (are_more or texts == sorted(texts)):
        place = next(place for place, own in enumerate(places) if place != own)
        _refuse(
            path,
            f"is not in the order of its numbers: by its line {names[place]!r} is class {place}, "
            f"by its number class {places[place]}",
            f"nothing tells which is meant: number the lines, as {place} {names[place]}",
        )
