"""When INT8 is refused, verified, or not known: chance, members, and the images that would tell."""

from math import ceil

import pytest

from calibration.statistics import Paired
from models.accuracy import MultiLabelDrop
from models.drop_rule import LEAST_IMAGES, bound, judged, outcome_of, rounded_up

LIMIT = 0.005


def judgement(pair: Paired, max_drop: float = LIMIT, num_figures: int = 1):
    (only,) = judged({"ensemble": pair.drop}, pair.num_images, max_drop, num_figures)
    return only


@pytest.mark.parametrize("num_images", [1, 50, LEAST_IMAGES - 1])
def test_few_images_verify_nothing_though_all_answers_are_the_same(num_images):
    assert judgement(Paired(num_images, 0, 0)).outcome == "unknown"


def test_the_fewest_images_that_verify():
    assert judgement(Paired(LEAST_IMAGES, 0, 0)).outcome == "verified"
    assert judgement(Paired(LEAST_IMAGES, 1, 1)).outcome == "unknown"


def test_the_bound_is_tighter_with_more_images_and_never_lets_two_points_pass():
    bounds = [bound(LIMIT, n) for n in (1, 50, 112, 400, 1000, 1451, 10_000, 10**6)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] == 0.02
    assert bound(LIMIT, 1000) == 0.01
    assert bounds[-1] == pytest.approx(LIMIT, abs=2e-4)


@pytest.mark.parametrize(
    ("pair", "outcome"),
    [
        (Paired(1000, 10, 0), "refused"),  # one point, and no image the other way
        (Paired(1000, 40, 30), "unknown"),  # as much, among many differences
        (Paired(10_000, 400, 300), "refused"),  # on ten times as many it is no chance
        (Paired(1000, 5, 0), "unknown"),  # half a point: not over the limit, its interval is
        (Paired(1000, 2, 2), "verified"),
        (Paired(1000, 0, 50), "verified"),  # INT8 is better
        (Paired(5, 5, 0), "unknown"),  # 1 of 16 by chance
        (Paired(8, 8, 0), "refused"),
    ],
)
def test_a_loss_is_refused_if_it_is_over_the_limit_and_no_chance(pair, outcome):
    assert judgement(pair).outcome == outcome


def test_more_members_need_more_evidence_against_one():
    pair = Paired(1000, 7, 0)  # p = 2 / 2^7
    assert judgement(pair, num_figures=3).outcome == "refused"
    assert judgement(pair, num_figures=4).outcome == "unknown"


def test_one_refuses_and_all_verify():
    good, bad, few = Paired(1000, 2, 2).drop, Paired(1000, 30, 0).drop, Paired(1000, 5, 0).drop
    assert outcome_of(judged({"a": good, "b": good}, 1000, LIMIT)) == "verified"
    assert outcome_of(judged({"a": good, "b": few}, 1000, LIMIT)) == "unknown"
    assert outcome_of(judged({"a": few, "b": bad}, 1000, LIMIT)) == "refused"
    assert outcome_of([]) == "unknown"


@pytest.mark.parametrize(
    "pair",
    [
        Paired(21, 0, 0),
        Paired(100, 1, 0),
        Paired(400, 9, 8),
        Paired(700, 20, 15),
        Paired(1451, 60, 50),
        Paired(1451, 14, 8),
    ],
)
def test_so_many_images_more_would_tell_if_they_went_on_alike(pair):
    said = judgement(pair)
    assert said.outcome == "unknown"
    assert said.num_more is not None

    def after(num_more: float) -> str:
        times = (pair.num_images + num_more) / pair.num_images
        counts = (ceil(v * times) for v in (pair.num_images, pair.only_first, pair.only_second))
        return judgement(Paired(*counts)).outcome

    assert after(1.3 * said.num_more) != "unknown"
    assert after(0.4 * said.num_more) == "unknown"


def test_the_images_that_would_refuse_are_those_of_a_two_sided_test():
    """One point lost of 1,000, 7 % differing: 1.96^2 (0.07 - 0.01^2) / 0.01^2 are 2,685 images."""
    said = judgement(Paired(1000, 40, 30))
    assert said.num_more is not None
    assert 2685 <= 1000 + said.num_more <= 2685 * 1.1  # in steps of 5 %, and rounded up


@pytest.mark.parametrize(
    ("num_images", "num_figures", "num_more"), [(3, 1, 3), (4, 1, 2), (5, 2, 2)]
)
def test_the_images_that_would_refuse_where_all_are_lost(num_images, num_figures, num_more):
    """All lost: n images refuse from 2^(1 - n) <= 0.05 / figures, so from 6 (one) or 7 (two)."""
    pair = Paired(num_images, num_images, 0)
    assert judgement(pair, num_figures=num_figures).num_more == num_more


def test_a_loss_of_just_the_limit_is_never_certain():
    pair = Paired(100_000, 5500, 5000)
    assert judgement(pair).num_more is None


@pytest.mark.parametrize(
    ("number", "rounded"), [(0.4, 1), (99, 99), (100, 100), (101, 110), (98765, 99000)]
)
def test_numbers_of_images_are_round(number, rounded):
    assert rounded_up(number) == rounded


def scores_drop(lost: float, half: float) -> MultiLabelDrop:
    return MultiLabelDrop(
        mean_average_precision=0.0,
        mean_average_precision_interval=(-half, half),
        micro_f1=lost,
        micro_f1_interval=(lost - half, lost + half),
    )


@pytest.mark.parametrize(
    ("drop", "num_images", "outcome"),
    [
        (scores_drop(0.02, 0.012), 1000, "refused"),
        (scores_drop(0.02, 0.018), 1000, "unknown"),  # excludes no loss alone, not as one of two
        (scores_drop(0.0, 0.008), 1000, "verified"),
        (scores_drop(0.0, 0.0), 24, "unknown"),  # no spread, since too few images to have one
        (scores_drop(0.0, 0.0), LEAST_IMAGES - 1, "unknown"),
        (scores_drop(0.0, 0.0), LEAST_IMAGES, "verified"),
        (scores_drop(0.5, 0.0), 1, "unknown"),
        (scores_drop(0.5, 0.0), 24, "refused"),
    ],
)
def test_both_figures_of_a_multi_label_set_are_judged(drop, num_images, outcome):
    assert outcome_of(judged({"ensemble": drop}, num_images, LIMIT)) == outcome
