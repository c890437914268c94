"""Every edit finds its place in the installed Serve's template; one that does not is told."""

import re
from pathlib import Path

import pytest
from app.launch.haproxy.addresses import listening_on, on_loopback, with_tls
from app.launch.haproxy.command import HaproxyCommand
from app.launch.haproxy.edit import Edit, unanchored
from app.launch.haproxy.edits import always, for_clusters, for_own, of_requests, unlogged
from app.launch.haproxy.grpc_rules import of_calls, of_frontend
from ray.serve._private import haproxy_templates

from app.errors import ConfigError
from app.launch.haproxy import command

TEMPLATE = Path(haproxy_templates.__file__).read_text("utf-8")
HTTP, GRPC = "backend http-tandem", "backend grpc-tandem"
EDITS = [
    *always(),
    of_frontend(),
    *of_requests(HTTP, 7),
    *of_calls(GRPC, 7),
    unlogged(),
    on_loopback((9101, 8404)),
    *with_tls("crt x.pem alpn http/1.1", (9101, 8404)),
    *listening_on("::", 8000, 9000),
    *for_own(HTTP),
    *for_clusters(HTTP, GRPC),
]
ANCHORS = [(edit, anchor) for edit in EDITS for anchor in edit.anchors]


def test_serves_template_has_a_place_for_every_edit() -> None:
    assert unanchored(EDITS, TEMPLATE) == []


@pytest.mark.parametrize(("edit", "anchor"), ANCHORS, ids=lambda value: str(value)[:40])
def test_an_edit_without_its_place_is_named(edit: Edit, anchor: str) -> None:
    whole = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    without = re.sub(anchor, "# another line", whole, flags=re.MULTILINE)
    assert without != whole
    assert f"{edit.purpose} (no line {anchor})" in unanchored(EDITS, f"TEMPLATE = {without!r}")


@pytest.mark.parametrize("ports", [None, (9101, 8404)], ids=["cluster", "own"])
def test_the_command_is_not_written_for_another_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ports: tuple[int, int] | None
) -> None:
    """Neither by tandem serve nor by tandem environment."""
    other = TEMPLATE.replace("\ndefaults\n", "\nusual\n")
    monkeypatch.setattr(command, "haproxy_template", lambda: other)
    with pytest.raises(ConfigError, match=r"Ray 2\.\S+ is installed.*pip install") as caught:
        HaproxyCommand(tmp_path / "haproxy", ports).write()
    assert "no place for the time limit of headers" in caught.value.message
    assert list(tmp_path.iterdir()) == []
