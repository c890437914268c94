"""The verdicts of tests/load/protocols.py come from the figures: other figures, other verdicts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "load"))
from protocol_study.claims import last_gain, lowest_latency, rest_and_grpc
from protocol_study.figures import Figures
from protocol_study.turns import medians


def row(protocol: str, payload: str = "jpeg", clients: int = 1, batch: int = 1, **figures) -> dict:
    key = {"section": "clients", "protocol": protocol, "payload": payload}
    return key | {"clients": clients, "batch": batch} | figures


@pytest.mark.parametrize(
    ("rates", "last"),
    [((100, 120, 140, 141), 16), ((100, 120, 140, 160), 64), ((100, 90, 104, 80), 1)],
)
def test_the_last_batch_that_gained(rates, last):
    rows = [row("x", batch=b, images_per_s=r) for b, r in zip((1, 4, 16, 64), rates, strict=True)]
    assert last_gain(rows) == last
    assert last_gain([*rows, row("x", batch=256, refused="too long")]) == last


@pytest.mark.parametrize(("grpc_ms", "holds"), [(9.0, True), (11.0, False)])
def test_who_has_the_lowest_latency(grpc_ms, holds):
    rows = [row("HTTP raw", p50_ms=10.0), row("OIP gRPC", p50_ms=grpc_ms)]
    found = lowest_latency(Figures({"rows": rows}))
    assert found.holds is holds
    assert f"OIP gRPC {grpc_ms:.1f} ms" in found.shown


@pytest.mark.parametrize(
    ("rest", "json", "holds"), [(95, 50, True), (80, 50, False), (95, 95, False)]
)
def test_what_comes_near_grpc(rest, json, holds):
    rates = {"OIP REST binary": rest, "OIP gRPC": 100, "OIP REST JSON": json}
    rows = [row(name, "uint8", 16, images_per_s=rate) for name, rate in rates.items()]
    assert rest_and_grpc(Figures({"rows": rows})).holds is holds


def test_medians_of_figures_within_a_figure_and_of_what_is_not_told():
    rounds = [
        {"p50_ms": 1.0, "watts": {}, "by": {"a": 3.0}, "why": "x", "none": None},
        {"p50_ms": 5.0, "watts": {}, "by": {"a": 1.0}, "why": "x", "none": None},
        {"p50_ms": 2.0, "watts": {}, "by": {"a": 2.0}, "why": "x", "none": None},
    ]
    expected = {"p50_ms": 2.0, "watts": {}, "by": {"a": 2.0}, "why": "x", "none": None}
    assert medians(rounds) == expected
