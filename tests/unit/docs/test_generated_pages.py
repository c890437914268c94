"""docs/reference is what the code says."""

import re

import pytest

from app.errors import OriginError, RouteError
from app.http.api import PROBES
from tests.support import reference
from tests.support.haproxy_configs import haproxys_errors

ROUTE = re.compile(r"^\| `(\w+ \S+)` \| (.+) \| (.+) \| ([0-9, ]+) \|$", re.M)


@pytest.mark.parametrize("name", reference.pages())
def test_the_reference_is_what_the_code_says(name: str):
    written = (reference.FOLDER / name).read_text("utf-8")
    assert written == reference.pages()[name], "run make reference, and commit what it writes"


def test_the_folder_has_no_other_page():
    assert {path.name for path in reference.FOLDER.iterdir()} == set(reference.pages())


def test_every_command_has_its_options_and_what_they_do():
    page = reference.command_line_page()
    for command in ("serve", "classify", "models add", "quantize", "evaluate", "plan"):
        assert f"## tandem {command}\n" in page
    assert "| `--api-keys-file` |" in page.replace(" | `", " | `")
    assert "|  |\n" not in page  # a description is missing
    for option in (
        "| `--plan` | `full \\| fast`; default `full` |",
        "| `SET@VERSION` | `str`; required |",
        "| `--port` | `int \\| None`, 1 to 65535 |",
        "| `--files` | `int`, at least 1; default `1` |",
    ):
        assert option in page


def test_every_code_of_an_answer_has_a_row():
    rows = set(re.findall(r"^\| (\d+) \| `(\w+)` \|", reference.errors_page(), re.M))
    assert {(str(error.status), error.code) for error in (RouteError, OriginError)} <= rows
    assert {(str(status), code) for status, code in haproxys_errors()} <= rows


def test_routes_have_the_statuses_of_a_service_with_keys():
    routes = {
        route: (does, statuses) for route, does, _, statuses in ROUTE.findall(reference.http_page())
    }
    open_routes = {route for route, (_, statuses) in routes.items() if "401" not in statuses}
    assert open_routes == {f"GET {path}" for path in PROBES}
    for change in ("load", "unload"):
        assert "503" in routes[f"POST /v2/repository/models/{{model_name}}/{change}"][1]
    assert "500" in routes["POST /v2/repository/models/{model_name}/load"][1]
    assert routes["GET /readyz"] == routes["GET /v2/health/ready"]
