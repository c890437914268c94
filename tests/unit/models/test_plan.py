"""Plans of a set: what a manifest accepts, which networks they hold for, and what to trust."""

import math
from typing import Any

import pytest
import yaml

from calibration.sets.transaction import write_manifest
from models.errors import ModelSetError
from models.manifest import read_manifest
from models.model_set import load_model_set
from models.plan import AnswerSetRecord, AverageRecord, PlanRecord, SubsetRecord, TrustTable
from tests.support.cases import cases
from tests.support.plans import plan_of, planned, sure_from
from tests.support.scored_sets import write_scored_set
from tests.support.tiny_networks import save_model, tiny_model, write_tiny_set

TWO = ((("sure",), 0.7), (("unsure",), None))


@pytest.fixture
def folder(tmp_path):
    return planned(write_tiny_set(tmp_path / "tiny"), *TWO)


def changed(folder, change) -> None:
    """Change the plan in a set's manifest.yaml, as a person might."""
    content = read_manifest(folder).model_dump(mode="json", exclude_none=True)
    change(content["fast_plan"])
    (folder / "manifest.yaml").write_text(yaml.safe_dump(content))


@cases(
    "change, says",
    (lambda p: p["steps"][0].update(ask=["nobody"]), "fast_plan names 'nobody', no member of"),
    (lambda p: p["steps"][0].update(stop_at=1.5), "less than or equal to 1"),
    (lambda p: p["steps"][0].update(stop_at=-0.1), "greater than or equal to 0"),
    (lambda p: p["steps"][0].update(stop_at=math.nan), "finite number"),
    (lambda p: p["steps"][0].pop("stop_at"), "every step of a plan but the last has stop_at"),
    (lambda p: p["steps"][1].update(stop_at=0.5), "the last has none"),
    (lambda p: p["steps"][1].update(ask=["sure"]), "asks each member once, not sure, sure"),
    (lambda p: p["steps"][1].update(ask=[]), "at least 1 item"),
    (lambda p: p.update(steps=[]), "at least 1 item"),
    (lambda p: p.update(steps=[p["steps"][0]] * 3 + [p["steps"][1]]), "at most 3 items"),
    (lambda p: p["steps"][0].update(temperature=0.1), "greater than or equal to 0.2"),
)
def test_what_a_manifest_refuses(folder, change, says):
    changed(folder, change)
    with pytest.raises(ModelSetError) as raised:
        read_manifest(folder)
    assert says in raised.value.message


def test_a_plan_is_of_the_networks_weights_and_temperatures_that_it_was_made_for(folder):
    manifest = read_manifest(folder)
    assert manifest.usable_plan("INT8") == manifest.fast_plan
    assert manifest.plan_problem("INT8") is None
    first, *others = manifest.members
    network = save_model(tiny_model(gain=3.0), folder, "other")
    made = "was made for other networks, weights or temperatures; tandem evaluate tiny --images DIR"
    for update in ({"networks": {"INT8": network}}, {"weight": 2.0}, {"temperature": 1.5}):
        members = (first.model_copy(update=update), *others)
        other = manifest.model_copy(update={"members": members})
        assert made in (other.plan_problem("INT8") or "")
        assert other.usable_plan("INT8") is None
    assert manifest.model_copy(update={"fast_plan": None}).plan_problem("INT8", "~/tiny") == (
        "tiny has no fast plan; tandem evaluate ~/tiny --images DIR --plan makes one"
    )
    assert "is of INT8, not of FP16" in (manifest.plan_problem("FP16") or "")


def test_a_multi_label_set_has_no_plan(tmp_path):
    manifest = read_manifest(write_scored_set(tmp_path / "scored"))
    assert "classes that exclude each other" in (manifest.plan_problem("INT8") or "")
    held = AnswerSetRecord(probability=0.1, target=0.95, num_images=9, coverage=0.9, mean_size=1)
    (name, *_) = manifest.weights
    values: dict[str, Any] = {
        "sure": sure_from(0.5),
        "answer_set": held,
        "trust": (SubsetRecord(members=(name,)),),
        "fast_plan": plan_of(manifest.plan_key("INT8"), (((name,), None),)),
    }
    for what, value in values.items():
        with pytest.raises(ValueError, match=f"{what} is of classes that exclude each other"):
            type(manifest).model_validate(manifest.model_dump() | {what: value})


def test_a_plan_is_part_of_the_version_and_goes_with_other_weights(folder, tmp_path):
    plain = load_model_set(str(write_tiny_set(tmp_path / "plain" / "tiny")))
    model_set = load_model_set(str(folder))
    assert model_set.fingerprint() != plain.fingerprint()
    before = model_set.fingerprint()
    planned(folder, (("sure",), 0.71), (("unsure",), None))
    assert load_model_set(str(folder)).fingerprint() != before
    assert model_set.weighted({"sure": 1.0}).manifest.fast_plan is None


def test_each_average_has_its_own_trust():
    plan = plan_of("", ((("b",), 0.7), (("a", "c"), None)), bounds=(0.8, None))
    whole = AverageRecord(temperature=0.5, sure=sure_from(0.9))
    subset = SubsetRecord(members=("a",), temperature=2.0, sure=sure_from(0.6))
    table = TrustTable("set", ("a", "b", "c"), whole, (subset,), plan)

    def trust(names: str, step: int | None = None) -> tuple[float, float | None]:
        found = table.of(dict.fromkeys(names), step)
        return found.temperature, found.sure_from

    assert trust("abc") == (0.5, 0.9)
    assert trust("b", 0) == (1.0, 0.8)
    assert trust("bac", 1) == (1.0, None)
    assert trust("a") == (2.0, 0.6)
    assert trust("b") == trust("ba", 1) == (1.0, None)  # nothing was measured for these
    assert table.of(dict.fromkeys("bc")).no_bound == "set has no measured bound for b and c alone"
    assert table.of(dict.fromkeys("bac"), 1).no_bound is not None
    plain = TrustTable("set", ("a", "b"), AverageRecord())
    assert (plain.of({"a": 1}).no_bound, plain.of({"a": 1, "b": 1}).no_bound) == (None, None)


def test_a_plan_says_who_is_asked_and_is_kept_as_written(folder):
    plan = plan_of("", ((("b",), 0.7), (("a",), 0.7), (("c",), None)))
    assert plan.shares == pytest.approx({"b": 1.0, "a": 2 / 3, "c": 1 / 3})
    assert [plan.step_of(n) for n in range(5)] == [None, 0, 1, 2, None]
    assert plan.members == ("b", "a", "c")
    manifest = read_manifest(folder)
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest
    plan = manifest.fast_plan
    assert PlanRecord.model_validate(plan.model_dump(mode="json")) == plan
