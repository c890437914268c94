"""``tandem classify`` against a server on a thread: files, answers, exit codes."""

import json
from typing import Any

import pytest

from app.errors import ConfigError
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.http_server import classified
from tests.support.image_folder import write_image_folder

OF_ANOTHER_SERVICE = [
    (200, b"<html>"), (200, b"[]"), (200, b'"yes"'), (500, b""),
    (404, b'{"detail": "Not Found"}'), (502, b'{"error": "Bad Gateway"}'),
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with pictures and other things."""
    monkeypatch.chdir(tmp_path)
    return write_image_folder(tmp_path)


def classify(*arguments):
    return tandem("classify", *arguments)


def test_a_table_of_labels(server):
    result = classify("b.jpg", "--url", server.url + "/", "--top-k", "3")
    assert result.exit_code == 0, result.output
    for text in ("b.jpg", "tench", "0.900"):
        assert text in result.stdout
    assert server.requests == [("/v1/classify?top_k=3", b"b.jpg")]


def test_loopback_is_asked_without_a_proxy(server, proxy, tmp_path):
    key = tmp_path / "key"
    key.write_text("k" * 32)
    done = classify("b.jpg", "--url", server.url, "--key-file", key)
    assert done.exit_code == 0, done.output
    assert server.keys == [f"Bearer {'k' * 32}"]
    assert proxy.requests == []


@cases(
    "fields, note",
    ({"skipped_members": ["b", "c"]}, "a was likely enough; not asked: b, c"),
    ({"sure": False}, "not sure: tench"),
    ({"degraded": True, "missing_members": {"b": "late"}}, "degraded, without b (late)"),
    ({"sure": True}, ""),
)
def test_a_note_next_to_an_answer(server, fields, note):
    answer = classified() | fields
    server.answer = lambda _: (200, json.dumps(answer).encode())
    words = " ".join(classify("b.jpg", "--url", server.url).stdout.split())
    assert note in words
    assert ("sure" in words) is ("sure" in note)
    row = json.loads(classify("b.jpg", "--json", "--url", server.url).stdout)
    assert row == {"file": "b.jpg", **answer}


def opinion(label: str) -> dict[str, object]:
    row = {"index": 0, "label": label, "probability": 0.75}
    return {"label": label, "probability": 0.75, "predictions": [row]}


def test_only_members_that_disagree_are_shown(server):
    """A set of 1,000 classes has labels of five words, and an ensemble mostly agrees."""
    label = "German short-haired pointer, a hunting dog of many uses"
    agreed: dict[str, Any] = {"members": {name: opinion(label) for name in "abc"}}
    split = {"members": agreed["members"] | {"b": opinion("tench")}, "agreement": False}
    answers = {b"b.jpg": agreed, b"sub/c.webp": split}
    server.answer = lambda body: (200, json.dumps(classified(label) | answers[body]).encode())
    alone = classify("b.jpg", "--url", server.url).stdout
    assert "disagree" not in alone
    assert len(alone.splitlines()) <= 6  # borders, headings, two for the label
    both = classify("b.jpg", "sub/c.webp", "--url", server.url).stdout
    assert "disagree" in both
    assert "b tench 0.75" in both
    assert both.count("0.75") == 1


def test_json_is_one_line_per_file_in_order(server):
    server.answer = lambda body: (200, json.dumps(classified(body.decode() * 40)).encode())
    result = classify(".", "--json", "--url", server.url)
    assert result.exit_code == 0
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    names = ["a.PNG", "b.jpg", "odd[1].jpg", "sub/c.webp", "sub/deep/d.jpeg"]
    assert [row["file"] for row in rows] == names
    assert [row["predictions"][0]["label"] for row in rows] == [n * 40 for n in names]


def refuse_b(body: bytes) -> tuple[int, bytes]:
    if body == b"b.jpg":
        error = {"code": "not_an_image", "message": "no [image] here", "request_id": "r"}
        return 400, json.dumps({"error": error}).encode()
    return 200, json.dumps(classified()).encode()


def test_one_that_fails_is_told_and_counted(server):
    server.answer = refuse_b
    result = classify("*.jpg", "--url", server.url)
    assert result.exit_code == 1
    assert "no [image] here" in result.stdout
    assert "1 of 2 failed" in result.stderr
    rows = classify("*.jpg", "--json", "--url", server.url).stdout.splitlines()
    assert json.loads(rows[0])["error"]["code"] == "not_an_image"
    assert "predictions" in json.loads(rows[1])


def test_several_files_end_with_a_count_of_each_class(server):
    labels = {b"b.jpg": "tench", b"a.PNG": "[red]robin"}
    server.answer = lambda body: (
        200,
        json.dumps(classified(labels.get(body, "tench")) | {"sure": body != b"b.jpg"}).encode(),
    )
    summary = "tench 4, [red]robin 1; not sure of 1\n"
    assert classify(".", "--url", server.url).stderr == summary
    assert classify("b.jpg", "--url", server.url).stderr == ""
    assert classify(".", "--json", "--url", server.url).stderr == ""


def test_names_and_labels_are_shown_as_they_are(server, folder):
    (folder / "x[").mkdir()
    (folder / "x[" / "].jpg").write_bytes(b"")
    server.answer = lambda _: (200, json.dumps(classified("[red]robin")).encode())
    result = classify("odd[1].jpg", "x[/].jpg", "--url", server.url)
    assert result.exit_code == 0, result.exception
    for text in ("odd[1].jpg", "x[/].jpg", "[red]robin"):
        assert text in result.stdout


def test_a_service_that_is_not_there():
    url = "http://127.0.0.1:1"
    result = classify("b.jpg", "--json", "--url", url)
    assert result.exit_code == 1, result.exception
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "unreachable"
    assert error["message"].startswith(f"no answer from {url} (Connection refused)")
    assert "tandem serve" in error["message"]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://[::1", "nonsense"])
def test_an_address_that_is_none(url):
    result = classify("b.jpg", "--json", "--url", url)
    assert isinstance(result.exception, ConfigError)
    assert url in result.exception.message
    assert "tandem serve" not in result.exception.message


@cases(
    "words, option, command",
    (["classify", "--out", "x", "."], "--out", "classify-offline"),
    (["classify", "--address=auto", "."], "--address", "classify-offline"),
    (["classify", "--offline", ".", "--url", "x"], "--url", "classify"),
    (["classify-offline", "--key-file", "x", "."], "--key-file", "classify"),
)
def test_an_option_of_the_other_command_is_answered_with_it(words, option, command):
    done = tandem(*words)
    assert done.exit_code == 2
    assert f"{option} is an option of tandem {command}, not of" in done.output


@pytest.mark.parametrize("words", [["--offline", "x.jpg"], ["--top-k", "2", "x.jpg", "--offline"]])
def test_offline_as_an_option_is_the_other_command(words):
    done = classify(*words)
    alone = tandem("classify-offline", *(word for word in words if word != "--offline"))
    assert done.exit_code == alone.exit_code == 1
    assert str(done.exception) == str(alone.exception) == "no such file or folder: x.jpg"
    assert classify("--offline", "--help").stdout == tandem("classify-offline", "--help").stdout


def test_a_file_may_have_the_name_of_the_option(server, folder):
    (folder / "--offline").write_bytes(b"x")
    assert classify("--url", server.url, "--", "--offline").exit_code == 0
    assert [body for _, body in server.requests] == [b"x"]


def test_what_is_refused_for_a_moment_is_asked_again(server):
    error = {"code": "overloaded", "message": "full", "request_id": "r"}
    steps = iter([(429, json.dumps({"error": error}).encode())])
    server.answer = lambda _: next(steps, (200, json.dumps(classified()).encode()))
    result = classify("b.jpg", "--url", server.url)
    assert result.exit_code == 0, result.output
    assert "tench" in result.stdout
    assert len(server.requests) == 2


def test_an_answer_is_shown_as_it_came(server):
    """Fields too that this version of the client does not know."""
    answer = classified() | {"a field of tomorrow": [1, 2]}
    server.answer = lambda _: (200, json.dumps(answer).encode())
    result = classify("b.jpg", "--json", "--url", server.url)
    assert json.loads(result.stdout) == {"file": "b.jpg", **answer}


@pytest.mark.parametrize("answer", OF_ANOTHER_SERVICE)
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_another_service_at_the_url(server, answer, form):
    server.answer = lambda _: answer
    result = classify("b.jpg", "--url", server.url, *form)
    assert result.exit_code == 1, result.exception
    assert isinstance(result.exception, SystemExit)
    assert str(answer[0]) in result.stdout
    assert "not as Tandem does" in result.stdout


def test_a_file_that_cannot_be_read(server, folder):
    (folder / "folder.jpg").mkdir()
    (folder / "dangling.jpg").symlink_to(folder / "nowhere")
    result = classify("*.jpg", "--json", "--url", server.url)
    rows = {row["file"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert result.exit_code == 1
    assert rows["dangling.jpg"]["error"]["code"] == "unreadable"
    assert "predictions" in rows["b.jpg"]


def test_the_services_key_comes_from_a_file_or_the_environment(server, folder, monkeypatch):
    key = folder / "key"
    key.write_text("k" * 32)
    assert classify("b.jpg", "--url", server.url, "--key-file", key).exit_code == 0
    monkeypatch.setenv("TANDEM_API_KEY", "e" * 32)
    assert classify("b.jpg", "--url", server.url).exit_code == 0
    assert server.keys == [f"Bearer {'k' * 32}", f"Bearer {'e' * 32}"]


def test_labels_of_a_multi_label_set_which_may_be_none(server):
    labels = enumerate(("cat", "dog"))
    listed = [{"index": i, "label": text, "probability": 0.8} for i, text in labels]
    member = {"label": "cat", "probability": 0.8, "predictions": listed}
    members = {"a": member, "b": {"predictions": []}}
    several = {"predictions": listed, "members": members, "threshold": 0.4, "agreement": False}
    none = {"predictions": [], "members": {"a": {"predictions": []}}, "threshold": 0.4}
    answers = {b"b.jpg": several, b"sub/c.webp": none}

    def answer(body: bytes) -> tuple[int, bytes]:
        return 200, json.dumps(classified() | answers[body]).encode()

    server.answer = answer
    asked = ("b.jpg", "sub/c.webp", "--url", server.url, "--top-k", 4, "--threshold", 0.4)
    result = classify(*asked)
    assert result.exit_code == 0, result.output
    assert "a cat 0.80 + dog 0.80, b nothing" in " ".join(result.stdout.split())
    assert "no label from 0.4 on" in result.stdout
    assert {path for path, _ in server.requests} == {"/v1/classify?top_k=4&threshold=0.4"}
    assert "--top-k N" not in result.stderr
    assert "2 labels per image; --top-k N" in classify(*asked[:4], "--top-k", 2).stderr
    rows = [json.loads(line) for line in classify(*asked, "--json").stdout.splitlines()]
    assert [len(row["predictions"]) for row in rows] == [2, 0]


def test_one_of_a_services_sets(server):
    assert classify("b.jpg", "--url", server.url, "--model-set", "other").exit_code == 0
    assert [path for path, _ in server.requests] == ["/v1/classify?top_k=1&model_set=other"]
