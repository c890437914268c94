"""``tandem evaluate --foreign``: images of other classes choose bounds, and others judge them."""

import json
from pathlib import Path

import pytest

from calibration.sets.transaction import write_manifest
from models.manifest import read_manifest
from models.model_set import load_model_set
from tests.support.calibration.evaluated_sets import evaluated, two_precisions
from tests.support.plans import planned, sure_from
from tests.support.scored_sets import write_scored_set
from tests.support.tiny_networks import write_pictures

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("own"), num_per_color=180, side=16)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures in folders of other classes, and some in folders of the set's own."""
    folder = tmp_path_factory.mktemp("others")
    for path in sorted(write_pictures(folder, num_per_color=80, side=17).iterdir()):
        path.rename(folder / f"not-{path.name}")
    return write_pictures(folder, num_per_color=3, side=18)


def test_other_classes_raise_the_bound_and_are_measured(tmp_path, own, others) -> None:
    folder = two_precisions(tmp_path / "tiny")
    done = evaluated(folder, "--images", own, "--sure-at", "0.9")
    assert done.exit_code == 0, done.output
    before, kept = read_manifest(folder).sure, tmp_path / "foreign.json"
    assert before.foreign is None
    assert before.measured_on == f"{own.parent.name}/{own.name}"
    done = evaluated(folder, "--foreign", others, "--json", kept)
    assert done.exit_code == 0, done.output
    assert "9 images left out: their folders are named as the set's classes" in done.stderr
    facts = json.loads(kept.read_text("utf-8"))
    assert list(facts["foreign"]) == ["full", "sure alone", "unsure alone"]
    assert facts["foreign"]["full"]["share"] == 1.0  # one bound serves all, of alike pictures
    assert 90 < facts["foreign"]["full"]["num_images"] < 150
    assert f"full: 100.0% of {facts['foreign']['full']['num_images']}" in done.stdout


def test_what_does_not_go_with_it_is_refused(tmp_path: Path, own: Path, others: Path) -> None:
    folder = two_precisions(tmp_path / "tiny")
    for options, problem in (
        (("--foreign", others), "has no bound of sure answers; tandem evaluate"),
        (("--foreign", others, "--images", own), "with --images give --sure-at 0.95 or --plan"),
        (("--foreign", others, "--calibrate", "--images", own), "--foreign: --calibrate fits"),
        (("--foreign", others / "red"), "no images|not a folder"),
        (("--sure-at", "0.9"), "--sure-at needs labelled images"),
        ((), "evaluate needs labelled images"),
        (("--images", own, "--wrong-weight", "2"), "--wrong-weight is of --calibrate"),
        (("--images", own, "--plan", "--wrong-weight", "2"), "--wrong-weight: --plan searches"),
    ):
        done = evaluated(folder, *options)
        assert done.exit_code != 0
        assert any(part in str(done.exception) for part in problem.split("|")), done.exception
    scored = write_scored_set(tmp_path / "scored")
    assert "is multi-label" in str(evaluated(scored, "--foreign", others).exception)


def test_a_plan_takes_the_images_that_chose_the_bound(tmp_path: Path, own: Path) -> None:
    folder = planned(two_precisions(tmp_path / "tiny"), (("sure",), 0.6), (("unsure",), None))
    manifest = read_manifest(folder)
    foreign = {"dataset": "a/b", "num_images": 9, "share": 0.0, "interval": (0.0, 0.3)}
    sure = sure_from(0.5).model_dump() | {"foreign": foreign}
    content = manifest.model_dump(mode="json", exclude_none=True) | {"sure": sure}
    changed = type(manifest).model_validate(content)
    write_manifest(folder, changed)
    done = evaluated(folder, "--images", own, "--plan")
    assert "images of other classes (a/b) chose when tiny is sure" in str(done.exception)
    done = evaluated(folder, "--images", own, "--sure-at", "0.9")
    assert done.exit_code == 0, done.output
    steps = load_model_set(str(folder)).manifest.fast_plan.steps
    assert steps[0].sure.target == 0.9  # the plan's bounds follow
    assert steps[0].sure.measured_on is not None
