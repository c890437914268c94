"""``tandem drift``: table, page, JSON, exit code."""

import json
import os

from models.errors import ModelSetError
from models.files import ResultFileError
from tests.support.cases import cases
from tests.support.command_line import tandem

ROW = {"model_set": "tiny", "model_version": "0123456789ab", "agreement": True, "members": {}}


def record(path, labels, *, version="0123456789ab", start="", num_fast=0):
    """Write 100 answers whose labels repeat ``labels``, a minute apart from ``start`` on."""
    with path.open("w") as lines:
        for number in range(100):
            label = f"<{labels[number % len(labels)]}>"
            confidence = 0.5 + 0.005 * (number % 97)
            predictions = [{"index": 0, "label": label, "probability": confidence}]
            row = ROW | {"model_version": version, "predictions": predictions}
            row |= {"plan": "fast"} if number < num_fast else {}
            row |= {"time": f"{start}:{number % 60:02}"} if start else {}
            lines.write(json.dumps(row) + "\n")
    return path


def drift(reference, samples, *more):
    return tandem("drift", "--reference", reference, "--samples", samples, *more, columns=80)


def test_no_drift(tmp_path):
    done = drift(record(tmp_path / "a.jsonl", "ab"), record(tmp_path / "b.jsonl", "ba"))
    assert done.exit_code == 0, done.output
    assert "no drift: 100 samples and 100 references differ by no more than chance" in done.output
    table = [line for line in done.output.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= 80
    assert "…" not in done.output
    for words in ("Kolmogorov-Smirnov", "confidence", "matters from 0.2", "reference,"):
        assert words in done.output
    assert "note" not in done.output


def test_a_plan_is_compared_with_itself(tmp_path):
    full, mixed = (record(tmp_path / f"{num}.jsonl", "ab", num_fast=num) for num in (4, 60))
    text = " ".join(drift(full, mixed).output.split())
    assert "the fast plan answered different shares" in text
    assert "reference 4%; samples 60%; compare each plan with itself: --plan full" in text
    done = drift(mixed, mixed, "--plan", "fast", "--json", "-")
    content = json.loads(done.stdout)
    assert (content["samples"]["plans"], content["notes"]) == ({"fast": 60}, [])


def test_drift_in_table_json_and_page(tmp_path):
    reference = record(tmp_path / "a.jsonl", "aab", start="2026-11-25T08")
    samples = record(tmp_path / "b.jsonl", "abb", version="ba9876543210", start="2026-11-26T08")
    page, result = tmp_path / "page.html", tmp_path / "drift.json"
    done = drift(reference, samples, "--json", result, "--html", page)
    assert done.exit_code == 1, done.output
    assert "drift: classes" in done.output
    assert "2026-11-25 08:00 to 2026-11-25 08:59 UTC" in done.output
    assert "different versions answered, so a difference may come from the networks" in done.output
    content = json.loads(result.read_text())
    assert (content["drift"], content["verdict"]) == (True, "drift: classes")
    assert [each["is_drift"] for each in content["differences"]] == [True, False, False]
    assert content["samples"]["versions"] == {"ba9876543210": 100}
    first = content["classes"][0]
    assert (first["label"], first["num_reference"], first["num_samples"]) == ("<a>", 67, 34)
    text = page.read_text()
    assert '<p class="verdict bad">drift: classes</p>' in text
    assert text.count("<svg") == 2
    assert "&lt;a&gt;" in text
    assert "<a>" not in text


def test_names_that_are_not_utf8_are_on_the_page_and_no_drift(tmp_path):
    path = record(tmp_path / os.fsdecode(b"caf\xe9.jsonl"), "a\ud800")
    page = tmp_path / "page.html"
    done = drift(path, path, "--html", page, "--json", "-")
    assert (done.exit_code, json.loads(done.stdout)["drift"]) == (0, False)
    text = page.read_text("utf-8")
    assert "caf?.jsonl" in text
    assert "&lt;?&gt;" in text


def test_versions_are_shown_as_they_are(tmp_path):
    path = record(tmp_path / "a.jsonl", "ab", version="v[old]")
    other = tmp_path / "b.jsonl"
    other.write_text(path.read_text().replace('"v[old]"', "null"))
    done = drift(path, other)
    assert done.exit_code == 0, done.output
    assert "answered by v[old]\n" in done.output
    assert "answered by unknown\n" in done.output


def test_since_divides_one_record(tmp_path):
    first = record(tmp_path / "a.jsonl", "ab", start="2026-11-25T08")
    second = record(tmp_path / "b.jsonl", "bbbbc", start="2026-11-26T08")
    both = tmp_path / "both.jsonl"
    both.write_text(first.read_text() + second.read_text())
    done = drift(both, both, "--since", "2026-11-26")
    assert done.exit_code == 1
    assert "drift: classes" in done.output


@cases(
    "arguments, kind, message",
    (["--since", "yesterday"], ModelSetError, "--since 'yesterday': write a time as 2026-11-26"),
    (["--version", "f" * 12], ModelSetError, "samples: 0 answers, and the tests need at least 50"),
    (["--json", "/nowhere/x.json"], ResultFileError, "cannot write /nowhere/x.json"),
    (["--html", "-"], ResultFileError, "--html - is no file; name one"),
)
def test_what_is_refused(tmp_path, arguments, kind, message):
    path = record(tmp_path / "a.jsonl", "ab")
    done = drift(path, path, *arguments)
    assert isinstance(done.exception, kind)
    assert message in done.exception.message
