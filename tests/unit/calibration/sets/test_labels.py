"""A set gets other labels and class ids: its networks stay, and what was measured if it holds."""

from pathlib import Path

import pytest

from calibration.sets.labels import change_classes
from calibration.sets.transaction import write_manifest
from models.errors import ModelSetError
from models.ledger import current_records
from models.manifest import read_manifest
from models.model_set import earlier_sets, load_model_set
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.plans import planned
from tests.support.tiny_networks import LABELS, with_accuracy

IDS = ("n1", "n2", "n3")


@pytest.fixture
def measured(folder: Path) -> Path:
    """A set with a fast plan and an accuracy record."""
    planned(folder, (("sure",), 0.9), (("unsure",), None))
    manifest = with_accuracy(read_manifest(folder), {"ensemble": 1.0})
    write_manifest(folder, manifest)
    return folder


def names(folder: Path, *lines: str, file: str = "names.txt") -> Path:
    (path := folder.parent / file).write_text("\n".join(lines), "utf-8")
    return path


def changed(folder, labels=None, ids=None):
    """Change the classes; return the set, whether its record holds, and its plan."""
    made = change_classes(
        load_model_set(str(folder)),
        labels and names(folder, *labels),
        ids and names(folder, *ids, file="ids.txt"),
        lambda *_: None,
    )
    holds = bool(current_records(made.manifest))
    return made, holds, made.manifest.plan_problem("INT8")


def test_other_names_keep_the_plan_and_outdate_the_record(measured):
    made, holds, problem = changed(measured, labels=("rot", "grün", "blau"))
    assert load_model_set(str(measured)).labels == made.labels == ("rot", "grün", "blau")
    assert (made.class_ids, holds, problem) == (None, False, None)
    (before,) = earlier_sets(measured)
    assert before.labels == LABELS
    assert made.problems() == []


def test_with_ids_that_stay_all_holds_on(measured):
    made, holds, problem = changed(measured, ids=IDS)
    assert (made.labels, made.class_ids, holds, problem) == (LABELS, IDS, True, None)
    made, holds, problem = changed(measured, labels=("a", "b", "c"))
    assert (made.labels, made.class_ids, holds, problem) == (("a", "b", "c"), IDS, True, None)
    _, holds, _ = changed(measured, ids=("n3", "n2", "n1"))
    assert not holds


def test_another_order_takes_away_what_was_chosen_by_it(measured):
    _, holds, problem = changed(measured, labels=LABELS[::-1])
    assert not holds
    assert "has no fast plan" in problem
    changed(measured, ids=IDS)
    with pytest.raises(ModelSetError, match=r"in another order, which its class ids do not follow"):
        changed(measured, labels=LABELS)
    assert load_model_set(str(measured)).labels == LABELS[::-1]
    both, _, _ = changed(measured, LABELS, IDS[::-1])
    assert (both.labels, both.class_ids) == (LABELS, IDS[::-1])


@cases(
    "labels, ids, says",
    (("a", "b"), None, "names.txt has 2 labels; tiny has 3 classes, in the networks' order"),
    (None, ("n1", "n2"), "ids.txt has 2 class ids, 2 different ones, for 3 classes"),
    (("a", "#1 dad", "c"), None, "which is a class or a comment"),
)
def test_files_that_do_not_fit_change_nothing(measured, labels, ids, says):
    before = (measured / "manifest.yaml").read_bytes()
    with pytest.raises(ModelSetError, match=says):
        changed(measured, labels, ids)
    assert (measured / "manifest.yaml").read_bytes() == before


def test_the_command_says_what_a_set_has_now(measured):
    done = tandem("models", "labels", measured, names(measured, "0 a", "1 b", "2 b"))
    assert "3 classes, a to b; classes are numbered from 0; 'b' is the name of" in done.stdout
    assert f"{measured} has the labels a to b" in done.stdout
    assert "measured with the labels of before: tandem evaluate" in done.stdout
    done = tandem("models", "labels", measured, "--class-ids", names(measured, *IDS))
    assert "a to b, with ids from n1 on" in done.stdout
    assert "give a FILE of labels, or" in str(tandem("models", "labels", measured).exception)
