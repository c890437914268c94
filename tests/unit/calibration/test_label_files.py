"""Class names are read from the forms of files that people have, or refused by name."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from calibration.label_files import MAX_BYTES, read_class_names
from models.errors import ModelSetError
from tests.support.cases import cases

ODD = ("cat", "4 o'clock", "747 airliner", "tench, Tinca tinca", "naïve", "C#", "a-b", "h", "i",
       "j", "k", "l")  # fmt: skip
COUNTED = tuple(f"class {k}" for k in range(12))  # names that end in numbers themselves
AS_TEXT = (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)
SYNSETS = tuple(f"n{k:08d}" for k in range(12))


def read(folder: Path, text: str | bytes, name: str = "labels.txt") -> tuple[str, ...]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return tuple(read_class_names(folder / name).names)


def lines(rows: Iterable[str], end: str = "\n") -> str:
    return "".join(row + end for row in rows)


def table(*rows: Sequence[object], delimiter: str = ",") -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    return text.getvalue()


def items(names: Sequence[str], first: int, **fields: str) -> str:
    more = "".join(f"  {key}: {value!r}\n" for key, value in fields.items())
    return lines(
        f"item {{\n{more}  name: {n!r}\n  id: {k} # c\n}}" for k, n in enumerate(names, first)
    )


@pytest.mark.parametrize("names", [ODD, COUNTED])
@pytest.mark.parametrize(
    "sign", [" ", ": ", ":", "\t", ",", ", ", ";", ". ", ") ", " - ", "=", " | "]
)
@pytest.mark.parametrize("first", [0, 1])
def test_numbers_before_names_in_any_order_of_lines(tmp_path, names, sign, first):
    rows = [f"{k + first}{sign}{names[k]}" for k in AS_TEXT]
    assert read(tmp_path, lines(rows)) == names
    assert read(tmp_path, lines(rows, "\n\n")) == names  # empty lines do not count then


@pytest.mark.parametrize("names", [ODD, COUNTED])
def test_forms_of_lines_and_values(tmp_path, names):
    of, turned = dict(enumerate(names)), {name: k for k, name in enumerate(names)}
    texts = {k: str(name) for k, name in of.items()}
    forms = {
        "plain": lines(names),
        "BOM, CRLF": "\ufeff" + lines(names, "\r\n") + "\r\n",
        "CR": lines(names, "\r"),
        "blanks": lines(f"  {name} \t" for name in names),
        "comments": "# mine\n\n" + lines(names) + "// end",
        "quotes": lines(f'"{name}"' for name in names),
        "padded": lines(f"{k:03} {name}" for k, name in of.items()),
        "Python with synsets": repr({k: f"{SYNSETS[k]} {name}" for k, name in of.items()}),
        "arrows": lines(f"{k} -> {name}" for k, name in of.items()),
        "quoted lines": lines(f'"{k} {name}"' for k, name in of.items()),
        "all quoted": lines(f'"{k}","{name}"' for k, name in of.items()),
        "all quoted, behind": lines(f'"{name}","{k}"' for k, name in of.items()),
        "brackets": lines(f"[{k}] {name}" for k, name in of.items()),
        "synsets": lines(f"{id_} {name}" for id_, name in zip(SYNSETS, names, strict=True)),
        "ILSVRC": lines(f"{SYNSETS[k]} {k + 1} {name}" for k, name in of.items()),
        "JSON": json.dumps(names),
        "JSON object": json.dumps(texts, indent=1),
        "JSON object from 1": json.dumps({k + 1: name for k, name in of.items()}),
        "JSON object, turned": json.dumps(turned),
        "Keras": json.dumps({k: [SYNSETS[k], name] for k, name in of.items()}),
        "Hugging Face": json.dumps({"x": 1, "id2label": texts, "label2id": turned}),
        "Python": "{" + ",\n ".join(f"{k}: {name!r}" for k, name in of.items()) + "}",
        "Python list": f"labels = {list(names)!r}",
        "bare": lines(f"{k}: {name!r}," for k, name in of.items()),
        "pbtxt": items(names, 1),
        "pbtxt from 0": "# map\n" + items(names, 0),
        "timm": json.dumps({"num_classes": 12, "label_names": names}),
        "fastai": json.dumps({"vocab": names}),
        "COCO": json.dumps(
            {"categories": [{"supercategory": "x", "id": k, "name": n} for n, k in turned.items()]}
        ),
        "objects": json.dumps([{"Class ID": k, "label": n} for k, n in reversed(of.items())]),
        "JSON Lines": lines(json.dumps({"id": k, "label": n}) for k, n in of.items()),
        "module": f"export default {json.dumps(names)}",
        "header": "index label\n" + lines(f"{k} {name}" for k, name in of.items()),
    }  # fmt: skip
    assert {form: read(tmp_path, text) for form, text in forms.items()} == dict.fromkeys(
        forms, names
    )
    tables = {
        "CSV": table(("index", "label"), *reversed(of.items())),
        "CSV, turned": table(("name", "id"), *turned.items()),
        "CSV of 3": table(("id", "synset", "name"), *((k, SYNSETS[k], n) for k, n in of.items())),
        "CSV, counts": table(("index", "label", "count"), *((k, n, 9) for k, n in of.items())),
        "CSV, other words": table(("Nummer", "Klasse"), *of.items(), delimiter=";"),
        "CSV without header": table(*of.items()),
        "CSV of names": table(("label",), *([name] for name in names)),
    }
    assert {form: read(tmp_path, text, "x.csv") for form, text in tables.items()} == dict.fromkeys(
        tables, names
    )


def test_yaml_as_ultralytics_has_it(tmp_path):
    of = dict(enumerate(ODD))
    for text in (
        "nc: 12\nnames:\n" + lines(f"  {k}: {json.dumps(name)}" for k, name in of.items()),
        "path: x # names: [a]\nnames:\n" + lines(f"- {json.dumps(name)}" for name in ODD),
        f"names: {json.dumps(ODD)}",
        lines(f"{k}: {json.dumps(name)}" for k, name in of.items()),
        lines(ODD),
    ):
        assert read(tmp_path, text, "data.yaml") == ODD
    for text, says in (("names: [a, b", "is not YAML"), ("names: [no, yes]", "neither a list")):
        with pytest.raises(ModelSetError, match=says):
            read(tmp_path, text, "data.yml")


def test_descriptions_of_timm_are_the_names(tmp_path):
    texts = dict(zip(SYNSETS, ODD, strict=True))
    both = {"label_names": SYNSETS, "label_descriptions": texts}
    assert read(tmp_path, json.dumps(both)) == ODD
    assert read_class_names(tmp_path / "labels.txt").ids == SYNSETS
    del texts[SYNSETS[3]]
    assert read(tmp_path, json.dumps(both)) == SYNSETS


def test_synsets_are_ids_in_the_order_of_the_classes(tmp_path):
    rows = (f"{k},{SYNSETS[k]},{ODD[k]}" for k in AS_TEXT)
    assert read(tmp_path, lines(rows)) == ODD
    assert read_class_names(tmp_path / "labels.txt").ids == SYNSETS
    shown = "item { name: '/m/01g317' id: 1 display_name: 'person' }"
    assert (
        read(tmp_path, shown + shown.replace("1 d", "2 d").replace("317", "318")) == ("person",) * 2
    )
    found = read_class_names(tmp_path / "labels.txt")
    assert found.ids == ("/m/01g317", "/m/01g318")
    assert "'person' is the name of several classes" in found.notes
    assert read(tmp_path, lines(SYNSETS)) == SYNSETS  # of --class-ids
    with_one = ("background", *SYNSETS)  # of 1,001 classes
    assert read(tmp_path, lines(with_one)) == with_one
    one_more = lines(("background", *(f"{synset} x{n}" for n, synset in enumerate(SYNSETS))))
    assert read(tmp_path, one_more)[:2] == ("background", "x0")
    assert read_class_names(tmp_path / "labels.txt").ids == with_one
    for first, other in (("n01440764", "tench"), ("tench", "n01440764")):
        assert read(tmp_path, str({0: (first, other)})) == ("tench",)
        assert read_class_names(tmp_path / "labels.txt").ids == ("n01440764",)


@cases(
    "text, names",
    ("0\n1\n2\n", ("0", "1", "2")),
    ("1\n2\n0\n", ("1", "2", "0")),  # neither order: that of the lines is meant
    ("0 0\n1 1\n2 10\n", ("0", "1", "10")),
    ('{"0": "0", "1": "1"}', ("0", "1")),
    ('{"0": "7", "1": "3"}', ("7", "3")),
    ("1 o'clock\n2 o'clock\n3 o'clock\n", ("1 o'clock", "2 o'clock", "3 o'clock")),
    ("5 euro\n10 euro\n20 euro\n", ("5 euro", "10 euro", "20 euro")),
    ("4 o'clock\n747 airliner\ncat\n", ("4 o'clock", "747 airliner", "cat")),
    ("DC-10\nDC-3\nBoeing 747\n", ("DC-10", "DC-3", "Boeing 747")),
    ("0 crane\n1 duck\n2 crane\n", ("crane", "duck", "crane")),
    ("\u0660 cat\n\u0661 dog\n", ("cat", "dog")),
    ("[unknown]\ncat\n", ("[unknown]", "cat")),
    ("<unk>\ncat\n", ("<unk>", "cat")),
    ("a\u2028b\nc\n", ("a\u2028b", "c")),
    ("cat 0\ndog 1\n", ("cat", "dog")),
    ("name id\ntabby cat 1\negyptian cat 0\n", ("egyptian cat", "tabby cat")),
    ("index,class_id,name\n0,0,cat\n1,1,dog\n", ("cat", "dog")),
    ('{"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}', ("a", "b")),
    ("item { id: 1 # id: 2\n name: 'a' } item { id: 2 # id: 1\n name: 'b' }", ("a", "b")),
    ("background\n1 o'clock\ncat\n", ("background", "1 o'clock", "cat")),
    ("#1 dad\n#2 dad\n#me\n", ("#1 dad", "#2 dad", "#me")),
    ("#labels\n0 cat\n1 dog\n", ("cat", "dog")),
    ('["#1 dad",\n"mom"]', ("#1 dad", "mom")),
    ids=lambda value: str(value)[:30],
)
def test_names_that_look_like_numbers(tmp_path, text, names):
    assert read(tmp_path, text) == names


GAP = "counted the classes .0 for 'a'., but 1 is missing; number them from 0"


@cases(
    "text, says",
    ("0 a\n2 b\n3 c\n", GAP),
    ("0 class 0\n2 class 1\n3 class 2\n", "but 1 is missing"),
    ('{"0": "a", "2": "b"}', GAP),
    ("0 a\n1 b\n1 c\n", "1 stands twice"),
    ("-1 a\n0 b\n", "-1 for 'a'"),
    ("0 a\nb\n2 c\n3 d\n", "begins some names as '0 a', and others as 'b'"),
    ("background\n1 a\n2 b\n", "as '1 a', and others as 'background'"),
    ("1 a\n2 b\nx\ny\nz\n", "begins some names as '1 a'"),
    ("n00000001 a\nn00000002 b\nc\n", "as 'n00000001 a', and others as 'c'"),
    ("0 a\n1:\n2 c\n", "others as '1:'"),
    ("a,0\nb,2\n", "but 1 is missing"),
    ("0 2\n1 0\n2 1\n", "read in two ways: '2' is class 0 or '0' is class 2"),
    ('{"0": 2, "1": 0, "2": 1}', "read in two ways"),
    ('{"0": "a", "0": "b"}', "has the key '0' twice"),
    ("{0: 'a', 0: 'b'}", "has the key '0' twice"),
    ("{0: 'a', 1: 'b',", "looks like JSON or a Python literal and cannot be read"),
    ("{'a', 'b'}", "neither a list of names nor numbers and names"),
    ('{"n00000001": "a", "n00000002": "b"}', "has names without numbers"),
    ('{"0": null, "1": true}', "neither a list of names"),
    ("[" * 100_000, "cannot be read as one"),
    ("{" + "-" * 200_000 + "1}", "cannot be read as one"),
    ("a\nb\n\nc\n", "has an empty line behind 'b'"),
    ("a # first\nb # second\n", "lines with # inside"),
    ("label\na\nb\n", "begins with 'label', a heading or a class"),
    ("a\tx\nb\ty\n", r"has a class 'a\\tx': empty, long"),
    ("index,label,label\n0,a,b\n1,c\n", "has 3 columns, and another number in line 3"),
    (lines(str(k) for k in AS_TEXT), "'10' is class 2, by its number class 10; .*as 2 10"),
    (lines(f"c_{k}.0" for k in AS_TEXT).replace(".0", ""), "not in the order of its numbers"),
    (lines(f"class {k}: {ODD[k]}" for k in AS_TEXT), "is class 2, by its number class 10"),
    ("1_a\n0_b\n2_c\n", "by its line '1_a' is class 0, by its number class 1"),
    ("entry {\n  target_class: 1\n}\n", "XML, HTML or a protobuf text"),
    ("item { id: 1 name: 'a' }\nitem { id: 2", "with something between its items"),
    ("item { id: 1 id: 2 name: 'a' }", "an item that has a field twice"),
    ("name,id\na,1.0\nb,0.0\n", "no whole number in some row of its column id; write 0, 1, 2"),
    ("id,name\n1,a\n,b\n0,c\n", "no whole number in some row of its column id"),
    ("index,class_id,name\n0,2,a\n1,0,b\n2,1,c\n", "'a' is class 0 or 'a' is class 2"),
    ('{"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 1, "b": 0}}', "label2id, which differ"),
    ("item { id: 1 }", "an item that lacks id or name"),
    ("<!DOCTYPE html>\na\n", "XML, HTML"),
    ("a\nb".encode("utf-16"), "is UTF-16; save it as UTF-8"),
    ("größe\n".encode("latin-1"), "is not UTF-8"),
    (b"a\0b\n", "has zero bytes"),
    (b"a" * (MAX_BYTES + 1), "larger than 4 MiB"),
    ("# nothing\n", "names no class"),
    ("mom\n#1 dad\n", "the line '#1 dad', which is a class or a comment; put a blank behind"),
    ("0 mom\n1 kid\n#2 dad\n", "the line '#2 dad', which is a class or a comment"),
    ("mom\n//dad\n", "the line '//dad', which is a class or a comment"),
    ("[]", "neither a list"),
    ('[{"id": 1, "name": "a"}, {"id": 3, "name": "b"}]', "but 2 is missing"),
    ('[{"id": 0, "name": "a"}, {"name": "b"}]', "objects without a number and a name each"),
    ('[{"x": 1}, {"x": 2}]', "objects without a number and a name each"),
    ('[{"id": 0}, {"id": 1}]', "which is the name is unclear"),
    ('{"id": 0}\n{"id": ', "cannot be read as one"),
    ('["a", "\\ud800"]', "has a class '.ud800': empty, long"),
    ("names:\n  0: a\n  1: b\n", "others as 'names:'"),
    ("x" * 2000, "empty, long, or with a tab"),
    ('["a", ""]', "has a class '': empty"),
    ids=lambda value: str(value)[:30],
)
def test_files_that_are_refused(tmp_path, text, says):
    with pytest.raises(ModelSetError, match=rf"labels\.txt .*{says}"):
        read(tmp_path, text)


def test_names_of_several_classes_are_reported_once(tmp_path):
    of = json.dumps({"id2label": dict(enumerate("abcdeabcde"))})
    read(tmp_path, of)
    notes = read_class_names(tmp_path / "labels.txt").notes
    assert [note for note in notes if "several" in note or "more" in note] == [
        *(f"{name!r} is the name of several classes" for name in "abc"),
        "and so are 2 more",
    ]


@cases("text", "dog,1,animal\ncat,0,animal\n", "species,order\ncat,carnivora\n")
def test_a_table_without_a_header_that_names_its_columns_is_refused(tmp_path, text):
    with pytest.raises(ModelSetError, match=r"no header that says .*; add one: index,name"):
        read(tmp_path, text, "x.csv")
