"""Pages of a package's template."""

import pytest
from jinja2 import UndefinedError

from calibration.evaluation.reports.html import rendered

TITLED = ("calibration.drift", "page.html.j2")


def test_values_are_escaped_and_need_not_be_utf8() -> None:
    values = {"is_drift": False, "verdict": "", "notes": [], "sides": {}, "rows": [], "level": 0.05}
    page = rendered(
        *TITLED, title="<b>caf\udce9</b>", num_more=0, classes="", confidence="", **values
    )
    assert b"&lt;b&gt;caf?&lt;/b&gt;" in page


def test_a_value_that_the_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        rendered(*TITLED)
