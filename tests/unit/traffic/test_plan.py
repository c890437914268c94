"""The plan: shares that sum to 100, what comes next, what comes back, and its order."""

import pickle

import pytest

from app.errors import BadParameterError
from app.traffic.plan import MAX_EARLIER, Plan, Split

A, B, C = "imagenet@aaaaaaaaaaaa", "imagenet@bbbbbbbbbbbb", "imagenet@cccccccccccc"


def test_shares_that_do_not_sum_to_100_are_refused_with_their_sum() -> None:
    with pytest.raises(
        BadParameterError, match=r"sum to 97, not to 100 \(.*95, .*2\): 3 are missing"
    ):
        Split({A: 95, B: 2})
    with pytest.raises(BadParameterError, match=r"sum to 105, not to 100 .*: 5 more than 100"):
        Split({A: 95, B: 10})
    with pytest.raises(BadParameterError, match="sum to 0, not to 100"):
        Split({})
    with pytest.raises(BadParameterError, match="is 105; give a percent"):
        Split({A: 105, B: -5})


def test_a_third_of_the_requests_each_is_a_split() -> None:
    assert Split({A: 100 / 3, B: 100 / 3, C: 100 / 3}).answering == (A, B, C)


def test_a_shadow_answers_nobody() -> None:
    with pytest.raises(BadParameterError, match="is the shadow and answers 5 %"):
        Split({A: 95, B: 5}, B)
    assert Split({A: 100, B: 0}, B).versions == (A, B)


def test_the_main_version_has_the_largest_share() -> None:
    assert Split({A: 5, B: 95}).main == B
    assert Split({A: 50, B: 50}).main == A
    assert Split({A: 100, B: 0}, C).versions == (A, B, C)


def test_a_promoted_version_answers_everything_and_is_no_shadow() -> None:
    assert Split({A: 95, B: 5}, C).promoted(B) == Split({B: 100}, C)
    assert Split({A: 100}, C).promoted(C) == Split({C: 100})


def test_rollback_goes_back_step_by_step() -> None:
    first, second, third = Split({A: 100}, B), Split({A: 95, B: 5}), Split({B: 100})
    plan = Plan.first(first).changed(second).changed(third)
    assert (plan.revision, plan.split) == (2, third)
    back = plan.rolled_back()
    assert (back.revision, back.split) == (3, second)
    again = back.rolled_back()
    assert (again.revision, again.split) == (4, first)
    with pytest.raises(BadParameterError, match="no earlier"):
        again.rolled_back()


def test_a_plan_keeps_a_bounded_number_of_earlier_ones() -> None:
    plan = Plan.first(Split({A: 100}))
    for _ in range(3 * MAX_EARLIER):
        plan = plan.changed(Split({A: 95, B: 5}))
    assert len(plan.earlier) == MAX_EARLIER


def test_plans_of_other_settings_have_another_origin() -> None:
    assert Plan.first(Split({A: 100})).origin != Plan.first(Split({B: 100})).origin
    assert (
        Plan.first(Split({A: 100})).origin
        == Plan.first(Split({A: 100.0})).changed(Split({B: 100})).origin
    )


def test_a_plan_has_the_same_order_in_every_process() -> None:
    plan = Plan.first(Split({A: 100.0}, B)).changed(Split({A: 95.0, B: 5.0}))
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert copy.order == plan.order
    assert "0x" not in plan.order[1]  # no address


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "send"),
        ({}, "send"),
        ({"shares": {A: "95"}}, "is no number"),
        ({"shares": {A: True}}, "is no number"),
        ({"shares": {A: 100}, "shadow": 3}, "shadow is not a string"),
    ],
)
def test_another_form_is_refused(content: object, message: str) -> None:
    with pytest.raises(BadParameterError, match=message):
        Split.of(content)
