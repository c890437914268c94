"""Limits: each refuses nothing at all, and what is in flight has room for the largest request."""

import pytest
from pydantic import ValidationError

from app.settings import Settings
from app.settings.limits import LimitSettings

NULLABLE = ("target_wait_ms", "answer_timeout_s")  # where 0, or null, has a meaning of its own


@pytest.mark.parametrize("name", [n for n in LimitSettings.model_fields if n not in NULLABLE])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="greater than"):
        Settings.model_validate({name: 0})


def test_one_request_must_have_room() -> None:
    with pytest.raises(ValidationError, match="max_bytes_in_flight is 9 and max_body_bytes 10"):
        Settings(max_body_bytes=10, max_bytes_in_flight=9)
    assert Settings(max_body_bytes=10, max_bytes_in_flight=10).max_body_bytes == 10
