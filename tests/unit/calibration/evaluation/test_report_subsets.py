"""The comparison of ensembles and the cascade as tables, settings, JSON, plot and page."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from rich.console import Console

from app.environment import PROJECT
from app.launch.config import ServeConfig
from app.settings import Settings
from app.stages.combiner import Combiner
from calibration.evaluation.evaluate import Evaluation
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.report_page import subsets_svg, write_plot
from calibration.evaluation.report_subsets import (
    setting_lines,
    settings_block,
    show_cascade,
    show_subsets,
    subsets_json,
)
from models.ensemble import average
from models.manifest import ENSEMBLE
from models.model_set import ModelSet
from tests.support.calibration.made_evaluations import (
    content_of,
    images_of,
    live_result,
    measure,
    model_set_of,
    rows_of,
)
from tests.support.calibration.made_subsets import NAMES, Drawn, compared
from tests.support.calibration.report_output import Page, page_of, shown

DRAWN = Drawn(num_images=200)
ARGS = "    args:\n      model_set: imagenette\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("set")


@pytest.fixture(scope="module")
def result(folder):
    return compared(folder, DRAWN)


def score_of(result, members: tuple[str, ...], method: str):
    wanted = (members, method, None)
    (found,) = [s for s in result.scores if (s.members, s.method, s.margin) == wanted]
    return found


def settings_of(folder, lines: list[str]) -> Settings:
    return Settings.model_validate(
        {"model_set": str(folder)} | (yaml.safe_load("\n".join(lines)) or {})
    )


def test_the_set_as_it_is_needs_no_line(result):
    assert setting_lines(score_of(result, NAMES, "average"), result) == []


def test_a_subset_is_a_line(result, folder):
    lines = setting_lines(score_of(result, ("good", "fair"), "average"), result)
    assert lines == ["weights: {good: 0.5, fair: 0.5}"]
    served = settings_of(folder, lines).load_set().manifest
    assert [(m.name, m.weight) for m in served.members] == [("good", 0.5), ("fair", 0.5)]


@pytest.mark.parametrize("method", ["average", "logistic"])
async def test_what_the_lines_serve_is_what_was_measured(result, folder, method):
    """The Combiner of the service, with the lines of the report, on the images that judge."""
    score = score_of(result, ("good", "fair"), method)
    settings = settings_of(folder, setting_lines(score, result))
    combiner = Combiner(settings)
    rows = {name: DRAWN.rows[name][:, :3] for name in ("good", "fair")}  # the tiny set's classes
    rows = {name: row / row.sum(axis=1, keepdims=True) for name, row in rows.items()}
    weights = np.array([score.weights[name] for name in rows])[:, None, None]
    stacked = np.stack([*rows.values()])
    logs = stacked if method == "average" else np.log(stacked)
    expected = (logs * weights).sum(axis=0).argmax(axis=1)
    assert settings.weights is not None
    asked = {name: rows[name] for name in settings.weights}  # a fit may leave nothing for the other
    found = [c.predictions[0].index for c in await combiner.combine(asked, 1)]
    assert np.mean(np.array(found) == expected) > 0.99  # weights are printed with four decimals


def test_a_cascade_is_a_line(result, folder):
    score = next(score for score in result.scores if score.margin is not None)
    lines = setting_lines(score, result)
    assert lines == [f"cascade_margin: {score.margin:g}"]
    assert settings_of(folder, lines).cascade_margin == score.margin


def test_a_weight_of_nothing_is_no_member(result):
    score = replace(
        score_of(result, ("good", "fair"), "logistic"), weights={"good": 1.0, "fair": 0.00001}
    )
    lines = setting_lines(score, result)
    assert lines[0] == "weights: {good: 1}"


@pytest.mark.parametrize("served_as", ["/data/😀", "/data/é: 'a' #b", "/data/caf\udce9"])
def test_any_folder_and_any_member_can_be_pasted(result, served_as):
    score = replace(result.scores[0], weights={"on": 0.5, "null": 0.25, "good": 0.25})
    text = settings_block(score, replace(result, served_as=served_as))
    args = yaml.safe_load(text)["args"]
    assert args["model_set"] == served_as
    assert args["weights"] == score.weights


def test_the_table(result):
    out = io.StringIO()
    show_subsets(Console(file=out, width=200, soft_wrap=True, highlight=False), result)
    text = out.getvalue()
    assert "good + fair + poor, logistic" in text
    assert f"judged on {result.num_judged} others" in text
    assert "cheapest that is not significantly worse than the best" in text
    assert "*" in text


def test_the_json(result):
    content = json.loads(json.dumps(subsets_json(result)))
    assert content["members"]["good"] == {"cpu_ms_per_image": 8.0, "memory_mb": 80.0}
    ensembles = content["ensembles"]
    assert len(ensembles) == len(result.scores)
    front = [e for e in ensembles if e["is_on_front"]]
    assert front
    best = max(ensembles, key=lambda e: e["top1"])
    assert max(front, key=lambda e: e["top1"])["top1"] == best["top1"]
    (chosen,) = [e for e in ensembles if e["name"] == content["suggested"]["name"]]
    alike = [e for e in ensembles if e["is_as_good_as_the_best"]]
    assert chosen["cpu_ms_per_image"] == min(e["cpu_ms_per_image"] for e in alike)
    assert chosen["behind_best"] == round(best["top1"] - chosen["top1"], 4)


def test_the_block_takes_the_place_of_args_in_the_file_and_serves(result, folder):
    """Every ensemble's: as printed, in the project's own serve_config.yaml."""
    file = (PROJECT / "serve_config.yaml").read_text("utf-8")
    assert file.count(ARGS) == 1
    for score in result.scores:
        pasted = file.replace(ARGS, settings_block(score, result) + "\n")
        config = ServeConfig.of(yaml.safe_load(pasted))
        served = {member.name for member in config.settings.load_set().manifest.members}
        names = {name for name, weight in score.weights.items() if weight > 1e-3}
        assert names <= served <= set(score.members)
        assert config.settings.cascade_margin == score.margin


def test_the_output_has_one_block(result, tmp_path):
    model_set = model_set_of(tmp_path / "made")
    measured = measure(model_set)
    measured.subsets = result
    text = shown(model_set, measured)
    assert text.count("args") == text.count("in place of args") + text.count("    args:\n") == 2
    block = text[text.index("    args:") :].split("judged on")[0]
    assert Settings.model_validate(yaml.safe_load(block)["args"])


@pytest.mark.parametrize(("name", "begins"), [("p.svg", b"<svg"), ("p.png", b"\x89PNG")])
def test_the_plot(result, tmp_path, name, begins):
    write_plot(tmp_path / name, result)
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_plot_follows_a_link(result, tmp_path):
    (tmp_path / "link.svg").symlink_to("plot.svg")
    write_plot(tmp_path / "link.svg", result)
    assert (tmp_path / "link.svg").is_symlink()
    assert (tmp_path / "plot.svg").read_bytes().startswith(b"<svg")


def test_a_plot_names_the_suggested_and_what_it_shows(result):
    svg = subsets_svg(result)
    assert subsets_json(result)["suggested"]["name"] in svg
    assert "Pareto front" in svg


NUM_SURE, NUM_UNSURE = 80, 20


@pytest.fixture
def measured(both: ModelSet) -> Evaluation:
    """100 images more: of 20 the first member is unsure and wrong, the second sure and right."""
    found = measure(both, truth=(0,), answer=(0,))
    truth = np.zeros(NUM_SURE + NUM_UNSURE, np.int64)
    first = np.concatenate([rows_of((0,) * NUM_SURE, 3, 0.9), rows_of((1,) * NUM_UNSURE, 3, 0.4)])
    rows = {"sure": first, "unsure": rows_of(tuple(truth), 3, 0.8)}
    rows[ENSEMBLE] = average(rows, dict.fromkeys(rows, 1.0))
    found.add(AnsweredBatch(images_of(truth), [], {"INT8": rows}, []))
    found.cpu_ms_per_image = {"sure": {"INT8": 4.0}, "unsure": {"INT8": 6.0}}
    for by_precision in (found.tallies, found.cascades, found.over_members, found.num_agreed):
        by_precision.pop("FP16", None)
    found.drops = {}
    return found


def test_the_line_is_one_that_the_application_takes(both, measured):
    line = content_of(both, measured)["cascade"]["INT8"]["setting"]
    says = "# top-1 100.0 % against 100.0 %, 80 % of images skip unsure, 5.2 instead of 10.0 CPU-ms"
    assert line.endswith(says)
    margin = Settings.model_validate(yaml.safe_load(line)).cascade_margin
    assert margin is not None
    assert 0.1 <= margin <= 0.85
    assert f"  {line}\n" in shown(both, measured)


def test_the_table_goes_from_never_to_always(both, measured):
    text = shown(both, measured, width=80)
    rows = [[cell.strip() for cell in li.split("│")[1:-1]] for li in text.splitlines() if "│" in li]
    rows = rows[[row[0] for row in rows].index("null (never skip)") :]
    assert [row[0].split()[-1] for row in rows] == ["skip)", "0.1)", "skip", "alone"]
    assert [row[1] for row in rows] == ["1.0000", "1.0000", "0.8020", "1.0000"]
    assert [row[-1] for row in rows] == ["10.0", "5.2", "4.0", "6.0"]
    assert rows[2][2].startswith("+19.80 (+13.20 to ")


def test_what_flatters_is_said_everywhere(tmp_path, both, measured):
    told = content_of(both, measured)["cascade"]["INT8"]["note"]
    assert "chosen on these same images" in told
    assert told in shown(both, measured)
    assert told in Page(page_of(tmp_path, both, measured)).text


@pytest.mark.parametrize(("cpu_ms", "is_told"), [(4.5, False), (4.0, True)])
def test_a_member_that_should_go_first_is_told(tmp_path, both, measured, cpu_ms, is_told):
    measured.cpu_ms_per_image["unsure"]["INT8"] = cpu_ms
    says = "unsure alone is better than sure for no more CPU time"
    assert (says in shown(both, measured)) == is_told
    assert (says in Page(page_of(tmp_path, both, measured)).text) == is_told
    told = content_of(both, measured)["cascade"]["INT8"]["better_first"]
    assert told == (["unsure"] if is_told else [])


def test_nothing_is_suggested_where_every_skipped_image_costs(both):
    found = measure(both, truth=(0,), answer=(0,))
    found.cascades.clear()
    rows = {"sure": rows_of((1,), 3, 0.99), "unsure": rows_of((0,), 3, 1.0)}
    rows[ENSEMBLE] = average(rows, dict.fromkeys(rows, 1.0))
    found.add(AnsweredBatch(images_of([0]), [], {"INT8": rows}, []))
    line = content_of(both, found)["cascade"]["INT8"]["setting"]
    assert yaml.safe_load(line) == {"cascade_margin": None}
    assert "no threshold within 0.5 points of the ensemble skips anything" in line


def test_the_json_has_the_points_and_the_page_draws_them(tmp_path, both, measured):
    cascade = json.loads(json.dumps(content_of(both, measured)))["cascade"]["INT8"]
    assert (cascade["first"], cascade["skipped"]) == ("sure", ["unsure"])
    never, *between, always = cascade["points"]
    assert (never["cascade_margin"], never["share_skipped"]) == (None, 0)
    assert (always["cascade_margin"], always["share_skipped"]) == (0, 1)
    assert len(between) >= 9
    assert always["lost"] == pytest.approx(20 / 101, abs=1e-4)
    page = Page(page_of(tmp_path, both, measured))
    assert {"sure alone", "unsure alone", "cascade, by threshold"} <= set(page.drawn)
    assert {"never skip", "always skip", cascade["setting"]} <= set(page.texts)


def test_float_networks_have_one_too(tmp_path):
    model_set = model_set_of(tmp_path / "set", precisions=("FP16",))
    assert "cascade, float: unsure asked only where sure is unsure" in shown(
        model_set, measure(model_set)
    )


def test_a_single_member_has_no_cascade(tmp_path):
    model_set = model_set_of(tmp_path / "set", members=("only",), precisions=("INT8",))
    measured = measure(model_set)
    assert "cascade" not in content_of(model_set, measured)
    assert "cascade" not in shown(model_set, measured)
    assert "Cascade" not in Page(page_of(tmp_path, model_set, measured)).text
    show_cascade(Console(), measured)  # says nothing


def test_members_that_a_live_cascade_skipped_have_no_top1(both):
    live = live_result(num_right={ENSEMBLE: 7, "sure": 7, "unsure": 2}, num_alone=6, num_partial=6)
    text = shown(both, measure(both), live)
    assert "top-1 ensemble 0.7000\n" in text
    assert "its cascade skipped members on 60.0% of images" in text
