"""Requests drawn from /openapi.json: each is answered, and as the schema says."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi import checks

from app.http.api import create_api
from tests.support.open_inference import Graph

NUM_DRAWN = 25  # of each operation
# The status codes that are documented, the documents' schemas, and never a 5xx that is none of
# them.
CHECKED: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
schema = schemathesis.openapi.from_asgi("/openapi.json", create_api(Graph().service))


def test_v2_is_documented() -> None:
    paths = set(schema.raw_schema["paths"])
    assert {
        "/v2/health/ready",
        "/v2/models/{model_name}/infer",
        "/v2/models/{model_name}/versions/{model_version}/infer",
    } <= paths


@schema.parametrize()
@settings(
    max_examples=NUM_DRAWN,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_every_operation_answers_as_the_schema_says(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKED)
