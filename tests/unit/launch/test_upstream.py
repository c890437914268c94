"""docs/upstream.md asks for an option for each edit of HAProxy's file and each private name."""

import re
from pathlib import Path

import pytest
from app.launch.haproxy.addresses import locally, on_loopback, with_tls
from app.launch.haproxy.edits import always, for_clusters, for_own, of_requests, unlogged
from app.launch.haproxy.grpc_rules import of_calls, of_frontend

from app.calls.ray_features import REPLICA_FEATURES
from app.launch.ray_features import LAUNCH_FEATURES

TEXT = (Path(__file__).parents[3] / "docs" / "upstream.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", TEXT, re.MULTILINE))
HTTP, GRPC = "backend http-tandem", "backend grpc-tandem"
EDITS = [
    *always(),
    of_frontend(),
    *of_requests(HTTP, 7),
    *of_calls(GRPC, 7),
    unlogged(),
    on_loopback((9101, 8404)),
    *locally(Path("http.sock"), Path("grpc.sock")),
    *with_tls("crt x.pem alpn http/1.1", (9101, 8404)),
    *for_own(HTTP),
    *for_clusters(HTTP, GRPC),
]
CHANGES = [edit.purpose for edit in EDITS] + [
    feature.name for feature in (*REPLICA_FEATURES, *LAUNCH_FEATURES)
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_has_a_request(change: str) -> None:
    numbers = re.findall(r"\d+(?=,|$)", ROWS[change])
    assert numbers or ROWS[change].startswith("none: ")
    for number in numbers:
        assert f"\n### {number}. " in TEXT


def test_nothing_is_asked_for_that_is_not_changed() -> None:
    asked = {row for row, request in ROWS.items() if re.match(r"[\dn]", request)}
    assert asked == set(CHANGES)
