"""docs/upstream.md asks for an option for each edit of HAProxy's file and each private name."""

import re
from pathlib import Path

import pytest

from app.launch.haproxy_rules import OwnService, RuleOptions, edits_of
from app.launch.ray_features import LAUNCH_FEATURES
from app.serve.ray_compatibility import REPLICA_FEATURES

TEXT = (Path(__file__).parents[3] / "docs" / "upstream.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", TEXT, re.MULTILINE))
OWN = OwnService("::", (Path("http.sock"), Path("grpc.sock")), "crt x.pem")
EDITS = [*edits_of(RuleOptions(), OWN), *edits_of(RuleOptions(), None)]
CHANGES = list(dict.fromkeys(edit.purpose for edit in EDITS)) + [
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
