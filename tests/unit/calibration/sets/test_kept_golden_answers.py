"""Golden answers stay with the networks that they were recorded from."""

import pytest

from calibration.sets.transaction import change, write_manifest
from models.errors import ModelSetError
from models.golden import Golden, read_golden
from models.manifest import read_manifest
from models.model_set import load_model_set
from models.record import FileRecord
from tests.support.calibration.staged_sets import contents, with_network
from tests.support.tiny_networks import record_golden


@pytest.fixture
def elsewhere(folder):
    """The set with golden answers that another CPU recorded."""
    record_golden(folder)
    golden = read_golden(folder / "golden.json")
    answers = {
        name: {p: one.model_copy(update={"cpu": "elsewhere"}) for p, one in by.items()}
        for name, by in golden.answers.items()
    }
    (folder / "golden.json").write_text(Golden(answers=answers).model_dump_json())
    update = {"golden": FileRecord.of(folder, "golden.json")}
    write_manifest(folder, read_manifest(folder).model_copy(update=update))
    return folder


def cpus(folder):
    golden = load_model_set(str(folder)).golden
    assert golden is not None
    return {name: by["INT8"].cpu for name, by in golden.answers.items()}


def test_golden_answers_of_unchanged_networks_are_kept(elsewhere):
    assert cpus(elsewhere) == {"sure": "elsewhere", "unsure": "elsewhere"}
    with change(elsewhere) as staging:
        staging.move_in(with_network(staging))
    found = cpus(elsewhere)
    assert found["unsure"] == "elsewhere"
    assert found["sure"] != "elsewhere"


def test_golden_answers_do_not_go_with_a_network_to_another_member(elsewhere):
    with change(elsewhere) as staging:
        manifest = read_manifest(elsewhere)
        one, two = manifest.members
        members = tuple(
            member.model_copy(update={"networks": other.networks})
            for member, other in ((one, two), (two, one))
        )
        swapped = manifest.model_copy(update={"members": members})
        staging.move_in(swapped.model_copy(update={"golden": staging.golden(swapped)}))
    assert "elsewhere" not in cpus(elsewhere).values()


def test_golden_answers_that_were_altered_are_not_taken_over(elsewhere):
    with (elsewhere / "golden.json").open("a") as file:
        file.write("\n")
    before = contents(elsewhere)
    with (
        pytest.raises(ModelSetError, match=r"golden\.json was altered"),
        change(elsewhere) as staging,
    ):
        with_network(staging)
    assert contents(elsewhere) == before
