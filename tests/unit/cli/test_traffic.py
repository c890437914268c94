"""``tandem traffic``: its tables, its changes, what promote refuses; and ``tandem keys``."""

import json

import pytest

from app.errors import ConfigError
from app.traffic.control import status_of
from app.traffic.plan import (
    BookStatus,
    Comparison,
    Disagreement,
    Figures,
    Plan,
    Split,
    VersionFigures,
)
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.plain_values import plain

A, B, C = "tiny@aaaaaaaaaaaa", "tiny@bbbbbbbbbbbb", "tiny@cccccccccccc"
NO_TRAFFIC = b'{"error": {"code": "no_traffic", "message": "this service has one version"}}'


def answering(server, seen, changed=None):
    """Let the service show a status, and another one after a change."""
    server.get = (200, json.dumps(seen).encode())
    server.answer = lambda _: (200, json.dumps(changed or seen).encode())


def sent(server):
    """Return the changes that the service was asked for."""
    assert {path for path, _ in server.requests} == {"/v1/traffic"}
    return [json.loads(body) for _, body in server.requests if body]


def status(num_agreed, num_differing, plan=None):
    comparison = Comparison()
    for _ in range(num_agreed):
        comparison.note(0.01, None)
    for number in range(num_differing):
        comparison.note(0.9, Disagreement(f"request-{number}", 1, ["[cat]", "dog"]))
    figures = Figures({A: VersionFigures(answered=950, computed=2, compute_ms=5.0)})
    figures.versions[A].latencies[8] = 950
    if comparison.compared:
        figures.pairs[f"{A} {B}"] = comparison
    plan = plan or Plan.first(Split({A: 95.0, B: 5.0}, C))
    book = BookStatus(plan, [plan.revision, 0], figures)
    return plain(status_of(book, {A: None, B: None, C: None}))


def test_the_table_shows_shares_figures_and_the_comparison(server):
    answering(server, status(90, 10))
    done = tandem("traffic", "--url", server.url)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    for line in (
        ["tiny", A[-12:], B[-12:], C[-12:]],
        ["share", "95", "%", "5", "%", "shadow"],
        ["answered", "950", "0", "0"],
        ["p50", "ms", "15.0", "-", "-"],
        ["compute", "ms", "2.5", "-", "-"],
        ["compared", "with", A[-12:]],
        ["photos", "-", "100", "-"],
        ["agree", "-", "90.0%", "-"],
        ["95", "%", "-", "82.6%-94.5%", "-"],
        ["total", "variation", "-", "0.099", "-"],
    ):
        assert line in lines, done.stdout
    assert f"request request-9, file 1: [cat]; by {B[-12:]}: dog" in done.stdout
    assert "revision 0, served by 2 of 2 Gateways; 0 to roll back to" in done.stdout


def test_a_table_fits_80_columns_and_json_is_the_services_answer(server):
    answering(server, status(90, 10))
    done = tandem("traffic", "--url", server.url, columns=80)
    assert "…" not in done.stdout
    assert "82.6%-94.5%" in done.stdout
    answering(server, status(90, 10))
    for command in (("traffic",), ("traffic", "show")):
        done = tandem(*command, "--json", "--url", server.url)
        assert json.loads(done.stdout) == status(90, 10)


@cases(
    "arguments, change",
    ((f"{A}=90", f"{B}=10%"), {"shares": {A: 90, B: 10}, "shadow": C}),
    ((f"{A}=90", f"{C}=10"), {"shares": {A: 90, C: 10}, "shadow": None}),
    ((f"{A}=100", "--shadow", B), {"shares": {A: 100}, "shadow": B}),
    (("--shadow", "none"), {"shares": {A: 95, B: 5}, "shadow": None}),
)
def test_set_sends_shares_and_keeps_the_shadow_if_it_can(server, arguments, change):
    plan = Plan.first(Split({A: 100.0})).changed(Split({A: 90.0, B: 10.0}))
    answering(server, status(0, 0), status(0, 0, plan))
    done = tandem("traffic", "set", *arguments, "--url", server.url)
    assert done.exit_code == 0, done.output
    assert sent(server) == [{**change, "revision": 0}]
    assert "1 of 2 Gateways serve it" in done.stderr
    assert f"traffic: {{{A}: 90, {B}: 10}}" in done.stderr


@pytest.mark.parametrize("text", [A, f"{A}=", f"{A}=many", "=5", f"{A}=nan", f"{A}=inf"])
def test_what_is_no_share_is_refused(server, text):
    answering(server, status(0, 0))
    done = tandem("traffic", "set", text, "--url", server.url)
    assert isinstance(done.exception, ConfigError)
    assert "is not a share: give NAME@VERSION=PERCENT" in done.exception.message
    assert sent(server) == []


def test_promote_sends_the_revision_that_it_looked_at(server):
    answering(server, status(1000, 0))
    done = tandem("traffic", "promote", B, "--url", server.url)
    assert done.exit_code == 0, done.output
    assert sent(server) == [{"shares": {B: 100}, "shadow": C, "revision": 0}]


def test_promote_refuses_with_the_figures_and_changes_nothing(server):
    answering(server, status(90, 60))
    done = tandem("traffic", "promote", B, "--url", server.url)
    assert done.exit_code == 1
    assert f"not promoted: {B}" in done.stderr
    assert "150 photos were compared with tiny@aaaaaaaaaaaa, 50 fewer than 200" in done.stderr
    assert "on 90 of 150 photos, 60.0%" in done.stderr
    assert sent(server) == []


def test_bounds_can_be_lowered(server):
    answering(server, status(90, 60))
    bounds = ("--min-compared", "100", "--min-agreement", "0.5")
    assert tandem("traffic", "promote", B, *bounds, "--url", server.url).exit_code == 0


def test_rollback_sends_the_revision_that_it_rolls_back(server):
    plan = Plan.first(Split({A: 100.0})).changed(Split({A: 90.0, B: 10.0}))
    answering(server, status(0, 0, plan))
    assert tandem("traffic", "rollback", "--url", server.url).exit_code == 0
    assert sent(server) == [{"rollback": True, "revision": 1}]


@cases(
    "answer, url, says",
    ((404, NO_TRAFFIC), "", ": this service has one version"),
    ((200, b"<html>"), "", " is no service of this kind: no JSON"),
    ((200, b"{}"), "http://127.0.0.1:9", "Connection refused; is the service running? tandem"),
    ((200, b"{}"), "http://[::1", "http://[::1 is no address"),
    ((200, b"{}"), "http://a..b", "http://a..b is no address"),
    ((200, b"{}"), "127.0.0.1:8000", "write http://127.0.0.1"),
)
def test_an_error_is_one_line(server, answer, url, says):
    server.get = answer
    done = tandem("traffic", "--url", url or server.url)
    assert isinstance(done.exception, ConfigError)
    assert says in done.exception.message
    assert url or done.exception.message.startswith(f"{server.url}{says}")


def test_a_proxy_does_not_get_the_key_for_this_machine(server, proxy, monkeypatch):
    monkeypatch.setenv("TANDEM_API_KEY", "k" * 32)
    answering(server, status(90, 10))
    done = tandem("traffic", "--url", server.url)
    assert done.exit_code == 0, done.output
    assert (len(server.requests) > 0, proxy.requests) == (True, [])


def test_keys_are_shown_with_what_they_used(server):
    ann = {"answered": 90, "refused": 9, "failed": 1, "images": 180, "cpu_ms": 7200.0}
    used = {"ann": ann, "[bob]": dict.fromkeys(ann, 0)}
    server.get = (200, json.dumps(used).encode())
    done = tandem("keys", "--url", server.url)
    head, first, second = done.stdout.splitlines()
    assert head.split()[:3] == ["key", "asked", "answered"]
    assert first.split() == ["ann", "100", "90", "9", "1", "180", "7.2", "40.0"]
    assert second.split() == ["[bob]", *["0"] * 5, "0.0", "-"]
    assert json.loads(tandem("keys", "--json", "--url", server.url).stdout) == used
    assert {path for path, _ in server.requests} == {"/v1/keys"}
    server.get = (200, b"{}")
    nothing = tandem("keys", "--url", server.url).stdout
    assert nothing.startswith("no key has been used yet; a service has keys by api_keys_file")
