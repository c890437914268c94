"""Pages of a package's template."""

from typing import Any

import pytest
from jinja2 import UndefinedError

from calibration.evaluation.reports.html import rendered

TITLED = ("calibration.commands", "drift.html.j2")


def test_values_are_escaped_and_need_not_be_utf8() -> None:
    values: dict[str, Any] = dict.fromkeys(("verdict", "notes", "rows", "classes"), "")
    values |= {"is_drift": False, "sides": {}, "level": 0.05, "num_more": 0, "confidence": ""}
    page = rendered(*TITLED, title="<b>caf\udce9</b>", **values)
    assert b"&lt;b&gt;caf?&lt;/b&gt;" in page


def test_a_value_that_the_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        rendered(*TITLED)
