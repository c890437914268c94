"""One evaluation as tables, JSON and a page: the same figures, and all text stays text."""

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tiny_networks import LABELS, write_tiny_set

from calibration import plots
from calibration.dataset import Dataset, LabelledImage
from calibration.evaluate import Evaluation
from calibration.fit_weights import FittedWeights
from calibration.inference import Answered
from calibration.ledger import record_of
from calibration.live import LiveResult
from calibration.report import as_json, points, show
from calibration.report_html import write_page
from calibration.tally import Tally
from models.accuracy import ENSEMBLE
from models.ensemble import average
from models.manifest import read_manifest
from models.model_set import ModelSet
from models.record import FileRecord, Precision

HOSTILE = (
    "<script>alert('x')</script>",
    "salt & pepper &amp; <b>",
    "$\\frac$ & $5$",  # as mathtext: a broken fraction
    '[red]tea[/] [/x] ]]> <!-- --> "quoted"',
    "größe 日本",  # letters that matplotlib's own font lacks
)
FITTED = FittedWeights(
    precision="INT8",
    weights={"sure": 0.75, "unsure": 0.25},
    num_fitted=4,
    num_judged=5,
    gain_nats=0.25,
    gain_interval=(0.125, 0.375),
    top1_plain=0.4,
    top1_fitted=0.6,
    top1_difference=0.2,
    top1_interval=(-0.1, 0.5),
    p_value=1.0,
)


# -- an evaluation made in code ---------------------------------------------------------------


def model_set_of(
    folder: Path,
    labels: tuple[str, ...] = LABELS,
    members: tuple[str, ...] = ("sure", "unsure"),
    precisions: tuple[Precision, ...] = ("FP16", "INT8"),
) -> ModelSet:
    """Return a tiny set with these classes; its float and INT8 networks are the same files."""
    folder.mkdir()
    (folder / "names.txt").write_text("\n".join(labels), "utf-8")
    names = FileRecord.of(folder, "names.txt")
    gains = dict.fromkeys(members, 4.0)
    write_tiny_set(folder, gains=gains, labels=names, num_classes=len(labels))
    manifest = read_manifest(folder)
    records = tuple(
        m.model_copy(update={"networks": dict.fromkeys(precisions, m.networks["INT8"])})
        for m in manifest.members
    )
    return ModelSet(folder, manifest.model_copy(update={"members": records}))


def measure(
    model_set: ModelSet,
    truth: tuple[int, ...] = (0, 0, 1, 1, 1, 2, 2, 2, 2, 2),
    answer: tuple[int, ...] = (0, 1, 1, 1, 0, 2, 2, 2, 2, 0),
    float_answer: tuple[int, ...] | None = None,
    name: str = "colours/eval",
    notes: tuple[str, ...] = (),
) -> Evaluation:
    """Count one batch in which every member says ``answer``, the last member a little less sure."""
    images = tuple(LabelledImage(Path(f"{i}.png"), t) for i, t in enumerate(truth))
    found = Evaluation(Dataset(name, images, notes), "0" * 64, int8_kernels="kernels")
    answers: dict[Precision, dict[str, np.ndarray]] = {}
    members = model_set.manifest.members
    for precision in members[0].networks:
        said = float_answer or answer if precision == "FP16" else answer
        rows = {
            m.name: rows_of(said, len(model_set.labels), 0.9 - 0.1 * i)
            for i, m in enumerate(members)
        }
        rows[ENSEMBLE] = average(rows, dict.fromkeys(rows, 1.0))
        answers[precision] = rows
        found.float_type[precision] = "f32"
        for m in members:
            found.cpu_ms_per_image.setdefault(m.name, {})[precision] = 1.25
    found.add(Answered(list(images), [], np.array(truth), answers, []))
    return found


def rows_of(answer: tuple[int, ...], num_classes: int, sure: float) -> np.ndarray:
    rows = np.full((len(answer), num_classes), (1 - sure) / (num_classes - 1), np.float32)
    rows[np.arange(len(answer)), answer] = sure
    return rows


def live_result(**changes) -> LiveResult:
    facts = {"num_images": 10, "num_right": {ENSEMBLE: 7}, "num_same": 10, "max_difference": 0.001}
    return LiveResult("http://[::1]:8000", **(facts | changes))


def content_of(model_set: ModelSet, measured: Evaluation, live: LiveResult | None = None) -> dict:
    return as_json(model_set.manifest, record_of(model_set, measured), measured, live)


def shown(
    model_set: ModelSet, measured: Evaluation, live: LiveResult | None = None, width: int = 200
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, soft_wrap=True, highlight=False)
    show(console, model_set.manifest, record_of(model_set, measured), measured, live)
    return out.getvalue()


def page_of(
    folder: Path, model_set: ModelSet, measured: Evaluation, live: LiveResult | None = None
) -> str:
    path = folder / "page.html"
    write_page(path, model_set, content_of(model_set, measured, live), measured)
    return path.read_text("utf-8")


class Page(HTMLParser):
    """What a browser would make of it: elements, attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.drawn: list[str] = []  # texts of the plots
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())
        if self.open and self.open[-1] == "text":
            self.drawn.append(data.strip())

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def drawn(svg: str) -> list[str]:
    return Page(svg).drawn


@pytest.fixture
def both(tmp_path: Path) -> ModelSet:
    return model_set_of(tmp_path / "set")


@pytest.fixture
def hostile(tmp_path: Path) -> ModelSet:
    return model_set_of(tmp_path / "set", HOSTILE)


# -- JSON -------------------------------------------------------------------------------------


def test_the_json_has_what_was_counted(both):
    measured = measure(both, float_answer=(0, 0, 1, 1, 1, 2, 2, 2, 2, 0))
    measured.unreadable = ["a.png: no image"]
    measured.fitted = FITTED
    content = content_of(both, measured, live_result())
    assert json.loads(json.dumps(content, allow_nan=False)) == json.loads(json.dumps(content))
    assert (content["set"], content["dataset"], content["num_images"]) == (
        "tiny",
        "colours/eval",
        10,
    )
    assert content["scores"]["INT8"][ENSEMBLE]["top1"] == 0.7
    assert content["scores"]["FP16"]["sure"]["top1"] == 0.9
    assert content["drops"]["sure"]["top1"] == 0.2
    assert content["drops"]["sure"]["p_value"] == 0.5
    assert content["agreement"] == {"FP16": 1.0, "INT8": 1.0}
    over = content["ensemble_over_members"]["INT8"]
    assert set(over) == {"sure", "unsure"}
    assert (over["sure"]["difference"], over["sure"]["p_value"]) == (0.0, 1.0)
    assert content["unreadable"] == ["a.png: no image"]
    assert content["fitted_weights"]["is_better"] is True
    assert content["live"]["is_same"] is True


def test_members_that_disagree_are_counted(tmp_path):
    model_set = model_set_of(tmp_path / "set", precisions=("INT8",))
    measured = measure(model_set)
    answers = {"sure": rows_of((0, 1), 3, 0.9), "unsure": rows_of((0, 2), 3, 0.6)}
    answers[ENSEMBLE] = average(answers, dict.fromkeys(answers, 1.0))
    measured.add(Answered([], [], np.array([0, 1]), {"INT8": answers}, []))
    content = content_of(model_set, measured)
    over = content["ensemble_over_members"]["INT8"]
    assert over["unsure"]["difference"] == round(1 / 12, 4)
    assert over["unsure"]["interval"][0] < 0 < over["unsure"]["interval"][1]
    assert content["agreement"] == {"INT8": round(11 / 12, 4)}


@pytest.mark.parametrize(
    ("precision", "members"), [("INT8", ("only",)), ("FP16", ("sure", "unsure"))]
)
def test_a_set_of_one_precision_has_no_drops(tmp_path, precision, members):
    model_set = model_set_of(tmp_path / "set", members=members, precisions=(precision,))
    measured = measure(model_set)
    content = content_of(model_set, measured)
    assert json.loads(json.dumps(content, allow_nan=False))["drops"] == {}
    assert set(content["scores"]) == {precision}
    assert "fitted_weights" not in content
    assert "live" not in content
    tables = shown(model_set, measured)
    assert "McNemar" not in tables
    assert ("f32" in tables) == (precision == "FP16")
    page = Page(page_of(tmp_path, model_set, measured))
    assert "What INT8 costs" not in page.text
    assert ("float (f32)" in page.texts) == (precision == "FP16")
    assert page.tags.count("svg") == 3
    assert {*members, ENSEMBLE} <= set(page.drawn)


def test_one_image_is_enough_for_every_report(tmp_path, both):
    measured = measure(both, truth=(1,), answer=(0,))
    json.dumps(content_of(both, measured), allow_nan=False)
    assert "0.0000" in shown(both, measured)
    assert Page(page_of(tmp_path, both, measured)).tags.count("svg") == 3


def test_an_ensemble_that_some_members_lack_is_not_reported(tmp_path, both):
    """One member was never quantised: INT8 has scores of the other alone."""
    measured = measure(both)
    for of_int8 in (measured.tallies["INT8"], measured.cpu_ms_per_image["unsure"]):
        for gone in ("unsure", ENSEMBLE, "INT8"):
            of_int8.pop(gone, None)
    del measured.over_members["INT8"]
    json.dumps(content_of(both, measured), allow_nan=False)
    assert shown(both, measured).count("INT8") >= 1
    page = Page(page_of(tmp_path, both, measured))
    assert page.tags.count("svg") == 3
    assert "sure" in page.drawn
    assert "unsure" not in page.drawn


# -- tables -----------------------------------------------------------------------------------


def test_the_tables_have_every_classifier_and_precision(both):
    lines = shown(both, measure(both)).splitlines()
    rows = [re.findall(r"[^│┃\s]+", line)[:3] for line in lines if re.match(r"│ \w", line)]
    assert rows[:6] == [
        ["sure", "f32", "0.7000"],
        ["sure", "INT8", "0.7000"],
        ["unsure", "f32", "0.7000"],
        ["unsure", "INT8", "0.7000"],
        ["ensemble", "f32", "0.7000"],
        ["ensemble", "INT8", "0.7000"],
    ]


def test_the_ensemble_costs_what_its_members_cost_together(both):
    (row,) = re.findall("│ ensemble │ INT8 .*│", shown(both, measure(both)))
    assert row.rstrip("│ ").endswith("2.5")


@pytest.mark.parametrize(("max_drop", "says"), [(0.1, "over +10.00"), (0.2, "up to +20.00")])
def test_a_drop_over_the_limit_is_told(both, max_drop, says):
    manifest = both.manifest.model_copy(update={"max_drop": max_drop})
    model_set = ModelSet(both.folder, manifest)
    text = shown(model_set, measure(both, float_answer=(0, 0, 1, 1, 1, 2, 2, 2, 2, 0)))
    assert "+20.00 " in text
    assert says in text


def test_a_long_member_name_leaves_the_figures_their_room(tmp_path):
    name = "convnext_" + "x" * 54
    model_set = model_set_of(tmp_path / "set", members=(name,), precisions=("INT8",))
    text = shown(model_set, measure(model_set), width=80)
    assert "…" not in text.split("95 %:")[0]
    (row,) = [line for line in text.splitlines() if "convnext_" in line and "│" in line]
    assert {"INT8", "0.7000", "0.397-0.892", "1.0000"} <= set(row.split())


def test_brackets_in_names_and_notes_are_no_markup(hostile):
    note = f"no images of 2 classes: {HOSTILE[3]}, [/]"
    measured = measure(hostile, name="[bold]/x[/]", notes=(note,))
    measured.unreadable = ["[red]/a[/].png: no image"]
    live = live_result(num_same=9, differences=["[red]/b[/].png: probability"])
    text = shown(hostile, measured, live)
    assert "[bold]/x[/], 10 images" in text
    assert note in text
    assert "  [red]/a[/].png: no image\n" in text
    assert "  [red]/b[/].png: probability\n" in text
    assert "live, http://[::1]:8000: top-1 ensemble 0.7000" in text
    assert "9 of 10 images answered as in process" in text


def test_of_many_unreadable_images_some_are_shown(both):
    measured = measure(both)
    measured.unreadable = [f"{i}.png: no image" for i in range(12)]
    text = shown(both, measured)
    assert "12 images cannot be read" in text
    assert "  9.png: no image\n  ... (--json has all)" in text
    assert "10.png" not in text


@pytest.mark.parametrize("is_better", [True, False])
def test_fitted_weights_are_recommended_only_if_better(both, is_better):
    measured = measure(both)
    measured.fitted = FITTED if is_better else replace(FITTED, gain_interval=(-0.1, 0.6))
    text = shown(both, measured)
    assert "fitted weights (INT8, 4 images): sure 0.750, unsure 0.250" in text
    assert "log-likelihood +0.2500 nats" in text
    assert ("they beat the plain average" in text) == is_better
    assert ("keep it" in text) != is_better


def test_a_path_that_is_not_utf8_can_be_shown_and_written(tmp_path, both):
    measured = measure(both)
    measured.unreadable = ["a\udcff.png: no image"]
    live = live_result(num_same=9, differences=["b\udcff.png: other"])
    out = io.BytesIO()
    console = Console(file=io.TextIOWrapper(out, "utf-8", write_through=True), width=200)
    show(console, both.manifest, record_of(both, measured), measured, live)
    assert b"a?.png" in out.getvalue()
    assert b"b?.png" in out.getvalue()
    assert "a?.png: no image" in Page(page_of(tmp_path, both, measured, live)).texts
    json.dumps(content_of(both, measured, live)).encode()


@pytest.mark.parametrize(("value", "says"), [(0.005, "+0.50"), (-0.1, "-10.00"), (0.0, "+0.00")])
def test_points_have_a_sign(value, says):
    assert points(value) == says


# -- the page ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a page that has every part there can be."""
    folder = tmp_path_factory.mktemp("page")
    model_set = model_set_of(folder / "set")
    measured = measure(model_set, float_answer=(0, 0, 1, 1, 1, 2, 2, 2, 2, 0))
    measured.fitted = FITTED
    return page_of(folder, model_set, measured, live_result(num_same=8))


def test_text_stays_text(tmp_path, hostile):
    name = "<i>photos</i>/a & b"
    measured = measure(
        hostile,
        truth=(0, 1, 2, 3, 4),
        answer=(1, 1, 2, 3, 4),
        name=name,
        notes=(f"no images of {HOSTILE[0]}",),
    )
    measured.unreadable = [f"{HOSTILE[0]}.png: {HOSTILE[1]}"]
    live = live_result(num_same=9, differences=[f"{HOSTILE[0]} {HOSTILE[2]}"])
    text = page_of(tmp_path, hostile, measured, live)
    page = Page(text)
    assert not {"script", "b", "i"} & set(page.tags)
    assert f"no images of {HOSTILE[0]}" in page.texts
    assert f"{HOSTILE[0]}.png: {HOSTILE[1]}" in page.texts
    assert f"{HOSTILE[0]} {HOSTILE[2]}" in page.texts
    assert f"tiny: accuracy on {name}" in page.texts
    for label in HOSTILE:  # the bars' labels, and both axes of the confusions
        assert page.drawn.count(label) == 3, label


def test_the_page_loads_nothing(whole_page):
    page, text = Page(whole_page), whole_page
    loading = {"src", "srcset", "href", "xlink:href", "data", "action", "poster", "background"}
    values = [value for name, value in page.attributes if name in loading]
    assert values  # markers and the confusions' picture
    assert all(value.startswith(("#", "data:image/")) for value in values)
    assert all(found == "#" for found in re.findall(r"url\(['\"]?(.)", text))
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "@import" not in text
    assert ("http-equiv", "Content-Security-Policy") in page.attributes
    assert "<!DOCTYPE svg" not in text
    assert "<?xml" not in text


def test_the_page_has_the_figures_of_the_json(whole_page):
    page = Page(whole_page)
    assert page.texts.count("0.7000") == page.texts.count("0.9000") == 3  # classifiers
    assert page.texts.count("+20.00") == 3
    assert any("sure 0.750, unsure 0.250" in t and "They beat" in t for t in page.texts)
    assert any(t.startswith("8 of 10 images answered as in process") for t in page.texts)


def test_a_class_without_images_is_not_drawn(tmp_path, both):
    measured = measure(both, truth=(0, 0, 2), answer=(0, 1, 2))
    page = Page(page_of(tmp_path, both, measured))
    assert "mostly blue" in page.drawn
    assert "mostly green" not in page.drawn
    assert "the worst" not in page.text


def test_of_a_thousand_classes_the_worst_twenty_are_drawn(tmp_path):
    labels = tuple(f"class {i:04}" for i in range(1000))
    model_set = model_set_of(tmp_path / "set", labels, ("only",), ("INT8",))
    truth = tuple(range(1000))
    wrong = set(range(500, 800, 10))  # thirty
    answer = tuple((t + 1) % 1000 if t in wrong else t for t in truth)
    page = Page(page_of(tmp_path, model_set, measure(model_set, truth, answer)))
    classes = [text for text in page.drawn if text.startswith("class ")]
    assert set(classes) == {f"class {i:04}" for i in range(500, 700, 10)}
    assert len(classes) == 3 * 20
    assert any("the worst 20 of 1000" in text for text in page.texts)


def test_the_page_replaces_an_older_one_in_one_step(tmp_path, both):
    (tmp_path / "page.html").write_text("old")
    assert "old" not in Page(page_of(tmp_path, both, measure(both))).texts
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["page.html"]


# -- plots ------------------------------------------------------------------------------------


def tally_of(truth: list[int], answer: list[int], num_classes: int) -> Tally:
    found = Tally(num_classes)
    found.add(rows_of(tuple(answer), num_classes, 0.9), np.array(truth))
    return found


def test_the_worst_classes_come_first_and_ties_keep_the_sets_order():
    tally = tally_of([0, 1, 1, 2, 2, 4], [0, 0, 1, 0, 2, 0], 5)
    assert plots.worst_classes(tally) == [4, 1, 2, 0]  # 3 has no images


def test_bars_are_in_the_order_of_the_ensembles_worst():
    tallies = {
        "a": tally_of([0, 1, 2], [1, 1, 2], 3),
        "ensemble": tally_of([0, 1, 1, 2], [0, 1, 0, 0], 3),
    }
    texts = drawn(plots.per_class(tallies, LABELS))
    labels = [text for text in texts if text in LABELS]
    assert labels == ["mostly red", "mostly green", "mostly blue"]
    assert {"a", "ensemble"} <= set(texts)


def test_confusions_are_shares_of_the_true_class():
    tally = tally_of([0] * 4 + [1] * 2 + [2], [0, 0, 0, 1, 1, 1, 2], 3)
    numbers = [text for text in drawn(plots.confusion(tally, LABELS)) if text.isdigit()]
    assert sorted(numbers) == ["100", "100", "25", "75"]


def test_what_a_class_left_out_of_the_picture_was_taken_for_still_counts():
    """Two images of class 0, one taken for class 1, which has no images of its own."""
    numbers = [
        t for t in drawn(plots.confusion(tally_of([0, 0], [0, 1], 3), LABELS)) if t.isdigit()
    ]
    assert numbers == ["50"]


def test_a_classifier_has_one_colour_in_all_plots():
    names = ["a", "b", "ensemble"]
    colors = [plots.color_of(name, names) for name in names]
    assert len(set(colors)) == 3
    assert plots.color_of("b", ["ensemble", "a", "b"]) == colors[1]
    many = [f"m{i}" for i in range(9)]
    assert plots.color_of("m8", many) in plots.MEMBER_COLORS
    tallies = {name: tally_of([0, 1], [0, 0], 2) for name in names}
    for svg in (plots.per_class(tallies, ("x", "y")), plots.reliability(tallies)):
        assert all(color in svg for color in colors)


def test_the_same_counts_give_the_same_plot_on_any_day():
    svg = plots.reliability({"a": tally_of([0], [0], 2)})
    assert plots.reliability({"a": tally_of([0], [0], 2)}) == svg
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    assert "dc:date" not in svg
