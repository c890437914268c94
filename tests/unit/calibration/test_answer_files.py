"""Kept answers of ``tandem classify-offline --out``, and runs that go on."""

import json
import os
import re
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

from calibration import answer_files
from calibration.answer_files import key_of
from models.errors import ModelSetError
from models.image_files import opened_store
from tests.support.cases import cases
from tests.support.command_line import classify_offline, tandem
from tests.support.object_stores import local_s3
from tests.support.tiny_networks import write_tiny_set


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.parquet", "answers[b]:cat:.jsonl"])
def test_a_run_goes_on_where_another_ended(tiny_set, pictures, tmp_path, name):
    files = sorted(pictures.rglob("*.png"))
    out = tmp_path / name
    assert f"4 images classified: {out}" in classify_offline(tiny_set, "--out", out, *files[:4])
    said = classify_offline(tiny_set, "--out", out, pictures, exit_code=1)
    assert f"6 images classified, 4 before: {out}" in said
    assert re.search(r" \(\d+\.\d images/s\)$", said, re.M)
    if out.is_dir():
        table = pyarrow.parquet.read_table(out)
        assert table.num_rows == 10
        by_file = {key_of(row): row for row in table.to_pylist()}
        labels = {file: row["label"] for file, row in by_file.items() if row["error"] is None}
        assert "image" in by_file[str(pictures / "bad.jpg")]["error"]
        assert dict(by_file[str(files[0])]["members"])["sure"][0]["label"] == files[0].parent.name
    else:
        rows = lines(out)
        assert len(rows) == 10
        labels = {key_of(r): r["predictions"][0]["label"] for r in rows if "error" not in r}
        (bad,) = [row["error"]["code"] for row in rows if "error" in row]
        assert bad == "not_an_image"
    assert labels == {str(file): file.parent.name for file in files}


def test_answers_are_kept_in_a_store(tiny_set, pictures, monkeypatch):
    files = sorted(pictures.rglob("*.png"))
    with local_s3(monkeypatch) as bucket:
        out = f"{bucket}/answers"
        classify_offline(tiny_set, "--out", out, *files[:4])
        said = classify_offline(tiny_set, "--out", out, pictures, exit_code=1)
        assert f"6 images classified, 4 before: {out}" in said
        filesystem, folder = opened_store(out)
        table = pyarrow.parquet.read_table(folder, filesystem=filesystem)
        labels = {key_of(row): row["label"] for row in table.to_pylist() if row["label"]}
        assert labels == {str(file): file.parent.name for file in files}
        assert "1 images classified" in classify_offline(tiny_set, "--out", bucket, files[0])
        out = f"{bucket}-absent/answers"
        done = tandem("classify-offline", "--model-set", tiny_set, "--out", out, pictures)
        assert f"--out {out}: " in str(done.exception)
        assert "name another place" in str(done.exception)


def test_a_line_that_was_cut_is_written_again(tiny_set, pictures, tmp_path):
    files, out = sorted(pictures.rglob("*.png"))[:3], tmp_path / "answers.jsonl"
    classify_offline(tiny_set, "--out", out, *files)
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    assert "1 images classified, 2 before" in classify_offline(tiny_set, "--out", out, *files)
    assert out.read_bytes() == whole


def test_parts_are_bounded(tiny_set, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(answer_files, "ROWS_A_PART", 4)
    out = tmp_path / "answers.parquet"
    classify_offline(tiny_set, "--out", out, *pictures.rglob("*.png"))
    sizes = [pyarrow.parquet.read_table(part).num_rows for part in sorted(out.iterdir())]
    assert sizes == [4, 4, 1]


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.parquet"])
def test_answers_of_another_version_are_not_mixed(tiny_set, pictures, tmp_path, name):
    file, out = sorted(pictures.rglob("*.png"))[0], tmp_path / name
    classify_offline(tiny_set, "--out", out, file)
    other = write_tiny_set(tmp_path / "other", gains={"sure": 3.0})
    done = tandem("classify-offline", "--model-set", other, "--out", out, file)
    assert "has answers of the model set's version" in str(done.exception)


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.parquet"])
def test_a_folder_that_is_classified_again(tiny_set, pictures, tmp_path, monkeypatch, name):
    """Each picture has one row, of the file as it is now, however its folder is named."""
    photos = tmp_path / "photos"
    shutil.copytree(pictures, photos)
    (photos / "bad.jpg").unlink()
    files = sorted(photos.rglob("*.png"))
    monkeypatch.chdir(tmp_path)

    def run(*paths: object) -> str:
        return classify_offline(tiny_set, "--out", name, *paths)

    def labels() -> dict[str, str]:
        is_folder = Path(name).is_dir()
        rows = pyarrow.parquet.read_table(name).to_pylist() if is_folder else lines(Path(name))
        assert len(rows) == len(files)
        first = str(files[0].parent)
        assert {row["folder"] for row in rows} == {str(photos), first}
        assert {row["file"].count("/") for row in rows if row["folder"] != first} == {1}
        return {key_of(row): (row.get("label") or row["predictions"][0]["label"]) for row in rows}

    run("photos/mostly blue/0.png")
    run(photos)
    expected = {str(file): file.parent.name for file in files}
    assert labels() == expected
    for again in ("photos", "./photos/", ".", photos, f"{photos}/../photos", files[0]):
        assert "0 images classified" in run(again)
    shutil.copy(files[-1], files[1])  # another picture takes its place
    os.utime(files[2])  # the same picture, copied again
    assert f"2 images classified, {len(files) - 2} before" in run("photos")
    assert labels() == expected | {str(files[1]): files[-1].parent.name}
    files[1].write_text("no image")
    classify_offline(tiny_set, "--out", name, "photos", exit_code=1)
    shutil.copy(files[-1], files[1])
    run("photos")
    assert labels() == expected | {str(files[1]): files[-1].parent.name}


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.parquet"])
def test_answers_of_other_options_are_not_mixed(tiny_set, pictures, tmp_path, name):
    file, out = sorted(pictures.rglob("*.png"))[0], tmp_path / name
    classify_offline(tiny_set, "--out", out, file)
    asked = ("classify-offline", "--model-set", tiny_set, "--out", out, "--top-k", 3, file)
    said = str(tandem(*asked).exception)
    assert f"--out {out}" in said
    assert "has answers with top_k 1, this run has 3; name another place, or remove it" in said


@cases(
    "out, said",
    ("answers.csv", "end it in .jsonl"),
    ("nowhere/answers.jsonl", "No such file or directory; name another place"),
    ("labels.jsonl", "line 1 is no answer"),
)
def test_where_nothing_can_be_kept(tiny_set, pictures, tmp_path, out, said):
    (tmp_path / "labels.jsonl").write_text("[1, 2]\n")
    options = ("--model-set", tiny_set, "--out", tmp_path / out)
    assert said in str(tandem("classify-offline", *options, pictures).exception)


def test_a_second_run_does_not_write_into_the_first_ones_file(tiny_set, pictures, tmp_path):
    out = tmp_path / "answers.jsonl"
    with answer_files.opened(out, "0" * 12):
        done = tandem("classify-offline", "--model-set", tiny_set, "--out", out, pictures)
    assert "another run is writing there" in str(done.exception)


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.parquet"])
def test_errors_of_before_are_the_exit_code_again(tiny_set, pictures, tmp_path, name):
    """A job that is retried must not turn green."""
    out, bad = tmp_path / name, pictures / "bad.jpg"
    classify_offline(tiny_set, "--out", out, bad, exit_code=1)
    said = classify_offline(tiny_set, "--out", out, bad, exit_code=1)
    assert "0 images classified, 1 before" in said
    assert "1 rows of an earlier run are errors" in said
    (good, *_) = pictures.rglob("*.png")
    classify_offline(tiny_set, "--out", out, good)  # that file's row is of no interest


def test_a_name_that_is_not_utf8(tiny_set, pictures, tmp_path):
    """As old archives have. JSON has it; Parquet's text has not, which is said at once."""
    (good, *_) = pictures.rglob("*.png")
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    shutil.copy(good, odd)
    done = tandem("classify-offline", "--model-set", tiny_set, "--out", tmp_path / "a.parquet",
                  good, odd)  # fmt: skip
    assert "caf\\xe9.png' is not UTF-8" in str(done.exception)
    assert list((tmp_path / "a.parquet").iterdir()) == []
    classify_offline(tiny_set, "--out", tmp_path / "a.jsonl", odd)
    assert [row["file"] for row in lines(tmp_path / "a.jsonl")] == [odd.name]


def test_a_last_row_without_a_line_feed_is_kept_and_a_foreign_file_not_cut(
    tmp_path, tiny_set, pictures
):
    (out := tmp_path / "a.jsonl").write_text('{"model_version": "v", "file": "a"}')
    with answer_files.opened(out, "v") as kept:
        assert kept.done == {"a": None}
        kept.add({"file": "b"})
    assert [row["file"] for row in lines(out)] == ["a", "b"]
    # Its last line ends without a line feed, as one that was cut does.
    (out := tmp_path / "notes.jsonl").write_text('{"my": "notes"}')
    done = tandem("classify-offline", "--model-set", tiny_set, "--out", out, pictures)
    assert "line 1 is no answer" in str(done.exception)
    assert out.read_text() == '{"my": "notes"}'


def test_a_full_disk_is_an_error_of_a_line(tmp_path):
    with answer_files.opened(tmp_path / "a.jsonl", "v") as kept:
        kept.add({"file": "a"})
        os.dup2(os.open("/dev/full", os.O_WRONLY), kept._file.fileno())  # type: ignore[attr-defined]
        with pytest.raises(ModelSetError, match=r"No space left .* the same command goes on"):
            kept.add({"file": "b"})
        os.dup2(os.open(tmp_path / "rest", os.O_WRONLY | os.O_CREAT), kept._file.fileno())  # type: ignore[attr-defined]


def test_an_embedding_is_kept_as_numbers_of_32_bits(tiny_set, pictures, tmp_path):
    out = tmp_path / "answers.parquet"
    files, asked = sorted(pictures.rglob("*.png")), ("--embedding", "unsure")
    classify_offline(tiny_set, "--out", out, *asked, *files[:3])
    table = pyarrow.parquet.read_table(out)
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32())
    said = classify_offline(tiny_set, "--json", *asked, *files[:3])
    assert table["embedding"].to_pylist() == [
        pytest.approx(json.loads(line)["embedding"]) for line in said.splitlines()
    ]
    assert all(len(row) == 3 for row in table["embedding"].to_pylist())
    done = tandem("classify-offline", "--model-set", tiny_set, "--out", out, files[0])
    assert done.exit_code == 0, done.output  # a run without has nothing to add
    other = ("--out", out, "--embedding", "sure", files[0])
    done = tandem("classify-offline", "--model-set", tiny_set, *other)
    assert "has answers with embedding unsure, this run has sure" in str(done.exception)
    done = tandem("classify-offline", "--model-set", tiny_set, "--embedding", "x", files[0])
    assert "embedding is 'x'; every image is asked of sure, unsure" in str(done.exception)
