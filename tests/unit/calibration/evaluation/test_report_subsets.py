"""A table of figures on a narrow terminal."""

import io

from rich.console import Console

from calibration.evaluation.report_subsets import figures_table


def test_long_names_wrap_and_figures_do_not() -> None:
    table = figures_table("network", "top-1", "95 %", title="test")
    table.add_row("a" * 60, "0.9000", "0.850-0.950")
    out = io.StringIO()
    Console(file=out, width=40).print(table)
    text = out.getvalue()
    assert text.count("a") == 60
    assert "│ 0.9000 │ 0.850-0.950 │" in text
