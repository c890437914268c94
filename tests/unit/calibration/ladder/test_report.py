"""Speed-ups, the table, the plot and the page, of results that are known."""

import io
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from calibration.ladder.report import against_published, as_json, draw, render, rows_of, show
from calibration.ladder.rungs import RungOptions, RungResult
from tests.support.calibration.ladders import job_of, measured

MACHINE = {"cpu": "a CPU", "cores": 2, "measured": "2026-01-01", "versions": {"tandem": "1"}}
ODD = "no <compiler> [bold] & $x^2$"


@pytest.fixture
def job(tmp_path):
    return job_of("resnet18", tmp_path, random_weights=True, rungs="eager,batches,compile,int8")


def results(**changes) -> dict[str, RungResult]:
    return {
        "eager": measured(10.0),
        "batches": measured(15.0, RungOptions(batch=8), top1=0.75, watts=20.0),
        "compile": RungResult(outcome="skipped", reason=ODD),
        "int8": measured(60.0, pss_mib=None),
    } | changes


def shown(job, found, width: int = 80) -> str:
    text = io.StringIO()
    show(Console(file=text, width=width), job, rows_of(job, found))
    return text.getvalue()


def test_speed_up_is_over_the_first_and_over_the_one_before_that_was_measured(job):
    rows = rows_of(job, results())
    assert [(r.over_first, r.over_previous) for r in rows] == [
        (1.0, 1.0),
        (1.5, 1.5),
        (None, None),
        (6.0, 4.0),
    ]
    rows = rows_of(job, results(eager=RungResult(outcome="failed", reason="it died")))
    assert [r.over_first for r in rows] == [None, 1.0, None, 4.0]
    assert against_published(rows) == ""  # that one begins with eager PyTorch


def test_the_table_has_the_figures_and_says_why_rungs_are_missing(job):
    text = shown(job, results())
    assert "top-1" in text
    assert ODD in text
    assert "random weights: speed only" in text
    assert next(line for line in text.splitlines() if line.startswith("INT8")).split()[3:] == [
        "1",
        "60.0",
        "1.0",
        "2.0",
        "120",
        "90",
        "5",
        "-",
        "-",
        "6.00",
        "4.00",
    ]
    assert max(map(len, text.split("\nskipped")[0].splitlines())) <= 80


def test_only_what_was_measured_has_a_column_beside_the_published_ladder(job):
    assert "top-1" not in shown(job, results(batches=measured(15.0)))
    rows = rows_of(job, results())
    assert "6.0 times" in against_published(rows)
    assert "21.2 times" in against_published(rows)


def test_json_has_every_rung_its_options_and_the_machine(job):
    content = as_json(job, rows_of(job, results()), MACHINE, 12.34)
    by_name = {rung["name"]: rung for rung in content["rungs"]}
    assert by_name["batches"]["options"] == {"batch": 8}
    assert by_name["batches"]["top1"] == 0.75
    assert by_name["int8"]["speedup_over_previous"] == 4.0
    assert by_name["compile"] == {
        "name": "compile",
        "title": "torch.compile",
        "outcome": "skipped",
        "reason": ODD,
    }
    assert (content["machine"]["versions"]["tandem"], content["weights"]) == ("1", "random")


def test_the_plot_is_svg_with_every_rung_and_always_the_same(job):
    rows = rows_of(job, results())
    svg = draw(rows, "resnet18 & co")
    assert svg == draw(rows, "resnet18 & co")
    texts = {
        "".join(e.itertext()).strip() for e in ET.fromstring(svg).iter() if e.tag[-4:] == "text"
    }
    assert {rung.title for rung in job.rungs} <= texts
    assert "60.0  (6.0x)" in texts
    assert "skipped" in texts


def test_the_page_escapes_what_it_is_told_and_loads_nothing(job):
    rows = rows_of(job, results())
    html = render(as_json(job, rows, MACHINE, 1.0), rows, "resnet18 <at> 64 px").decode()
    assert "no &lt;compiler&gt; [bold] &amp; $x^2$" in html
    assert "<compiler>" not in html
    assert "resnet18 &lt;at&gt; 64 px" in html
    assert "<script" not in html
    assert 'src="http' not in html
    assert "<svg" in html


def test_a_page_of_odd_names_and_one_of_nothing_measured(job):
    rows = rows_of(job, results())
    content = as_json(job, rows, MACHINE, 1.0) | {"weights": "caf\udce9"}
    assert b"weights: caf?." in render(content, rows, "t")
    rows = rows_of(job, {rung.name: RungResult(outcome="failed", reason="x") for rung in job.rungs})
    assert b"failed" in render(as_json(job, rows, MACHINE, 1.0), rows, "t")
