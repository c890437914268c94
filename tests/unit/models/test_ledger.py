"""What accuracy records permit: serve, warn, or refuse; by chance, members, and images."""

from collections.abc import Callable
from datetime import date
from math import ceil

import pytest

from calibration.evaluation.report import with_record
from calibration.sets.transaction import write_manifest
from calibration.statistics import Paired
from models.ledger import (
    LEAST_IMAGES,
    bound,
    current_records,
    judge,
    judged,
    outcome_of,
    records_of_networks,
    rounded_up,
)
from models.manifest import Manifest, read_manifest
from models.record import FileRecord, ImageRecord, MultiLabelDrop, ValidationDrop
from tests.support.cases import cases
from tests.support.plans import plan_of
from tests.support.tiny_networks import drop_of, with_accuracy, write_tiny_set

TOP1 = {"sure": 0.9, "unsure": 0.8, "ensemble": 0.9}
GOOD = drop_of(0.0, 700)
LIMIT = 0.005
STEPS = ((("sure",), 0.9), (("unsure",), None))


@pytest.fixture
def manifest(tiny_set):
    return read_manifest(tiny_set)


@pytest.fixture
def others(tmp_path):
    """The manifest of other networks."""
    return read_manifest(write_tiny_set(tmp_path / "other", gains={"sure": 3.0, "unsure": 1.0}))


@pytest.fixture
def floats(tmp_path):
    return read_manifest(write_tiny_set(tmp_path / "float", precision="FP16"))


def other_file(record: FileRecord) -> FileRecord:
    return record.model_copy(update={"sha256": "5" * 64})


def changed(manifest, **fields):
    return manifest.model_copy(update=fields)


def with_first(manifest, **fields):
    """Change the first member."""
    first, *others = manifest.members
    return changed(manifest, members=(first.model_copy(update=fields), *others))


def in_float(manifest: Manifest) -> Manifest:
    """As if its record were of the float networks."""
    (record,) = manifest.accuracy
    scores = {"FP16": record.scores["INT8"]}
    return changed(manifest, accuracy=(record.model_copy(update={"scores": scores}),))


def first_record(manifest, values, **record):
    """The record of a set that had none before."""
    return with_accuracy(changed(manifest, accuracy=()), TOP1, values, **record).accuracy[0]


CHANGES: dict[str, Callable[[Manifest], Manifest]] = {
    "weights of the average": lambda m: with_first(m, weight=1000.0),
    "the image rule": lambda m: changed(m, image=ImageRecord(input_size=16, resize_shorter=99)),
    "labels": lambda m: changed(m, labels=other_file(m.labels)),
    "class ids": lambda m: changed(m, class_ids=other_file(m.labels)),
    "the float type": lambda m: changed(m, float_type="bf16"),
}


def drops(value: float) -> dict[str, float]:
    return {"sure": 0.001, "unsure": -0.01, "ensemble": value}


def with_drop(manifest, drop, **record):
    return with_accuracy(manifest, TOP1, drops(drop), **record)


def not_known_later(manifest: Manifest) -> Manifest:
    """The older of two records of as many images has a refusal, overruled, and no open figure."""
    bad = with_drop(manifest, 0.1, num_images=2000, images_sha256="1" * 64)
    return with_accuracy(bad, TOP1, {**drops(0.0), "sure": 0.005}, num_images=2000)


UNIMPORTANT = {"description": "other words", "hint": "try this", "max_drop": 0.001}
ASK = "tandem evaluate tiny --images DIR"
VERDICTS: dict[str, tuple[Callable[[Manifest], Manifest], str, tuple[str, ...]]] = {
    "no record": (lambda m: m, "unmeasured", (ASK,)),
    "a drop within the limit": (lambda m: with_drop(m, 0.004), "verified", ()),
    "a drop over the limit": (lambda m: with_drop(m, 0.0123), "dropped",
        ("costs ensemble 1.23 points", "max_drop of 0.50 points", "--allow-unverified")),
    "the set's own limit": (lambda m: changed(with_drop(m, 0.0125), max_drop=0.02), "verified", ()),
    "one image": (
        lambda m: with_accuracy(m, TOP1, dict.fromkeys(TOP1, 0.0), num_images=1), "unknown",
        ("on 1 images of colours/eval; 2.00 points at most would verify it",
         "About 260 images more would tell: tandem evaluate tiny")),
    "verified, then fewer images": (
        lambda m: with_drop(with_drop(m, 0.0, images_sha256="1" * 64), 0.0, num_images=20),
        "verified", ()),
    "measured with a plan": (
        lambda m: m.model_copy(update={"fast_plan": plan_of(m.plan_key("INT8"), STEPS)}),
        "unmeasured", ("on 100 images of none, when its fast plan was made (2026-01-01); " + ASK,),
    ),
    "a plan of other networks": (
        lambda m: m.model_copy(update={"fast_plan": plan_of("", STEPS)}), "unmeasured",
        ("no accuracy record",),
    ),
    "never compared": (lambda m: with_accuracy(m, TOP1), "unmeasured", ("never compared",)),
    "dropped, then the same images without float networks": (
        lambda m: with_record(with_drop(m, 0.1), with_accuracy(m, TOP1).accuracy[0]),
        "dropped", ()),
    "refused, overruled, then not known": (
        not_known_later, "unknown", ("whether INT8 costs sure more than max_drop",)),
    "a change that no answer depends on": (
        lambda m: changed(with_drop(m, 0.0), **UNIMPORTANT), "verified", ()),
    "a record from before conditions were noted": (
        lambda m: with_drop(m, 0.0, conditions=None), "unmeasured",
        ("which image rule, labels and weights it was measured with", ASK)),
    "a drop from before conditions were noted": (
        lambda m: with_drop(m, 0.1, conditions=None), "dropped", ()),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(manifest, name):
    make, status, says = VERDICTS[name]
    verdict = judge(make(manifest))
    assert verdict.status == status
    for text in says:
        assert text in verdict.message


def test_one_bad_dataset_is_enough(manifest):
    bad = with_drop(manifest, 0.1, images_sha256="1" * 64)
    assert judge(with_drop(bad, 0.0, measured="2026-02-01", num_images=3999)).status == "dropped"
    first = with_drop(manifest, 0.0, images_sha256="1" * 64)
    assert judge(with_drop(first, 0.1)).status == "dropped"


@pytest.mark.parametrize("what", CHANGES)
def test_a_refusal_is_not_forgotten_when_something_else_changes(manifest, what):
    """Evaluated on one image after another weight, the set was "verified" (e917524)."""
    other = CHANGES[what](with_drop(manifest, 0.1, num_images=700))
    record = first_record(other, drops(0.0), num_images=1, images_sha256="1" * 64)
    assert judge(with_record(other, record)).status == "dropped"
    many = record.model_copy(update={"num_images": 700, "drops": {n: GOOD for n in record.drops}})
    assert judge(with_record(other, many)).status == "verified"


def test_a_refusal_is_undone_by_as_many_images_and_no_higher_limit(manifest):
    bad = with_drop(manifest, 0.1, num_images=700)
    generous = with_first(changed(bad, max_drop=1.0), weight=2.0)
    record = first_record(generous, drops(0.0), num_images=1)
    assert judge(changed(with_record(generous, record), max_drop=0.005)).status == "dropped"
    bad = with_drop(manifest, 0.1, images_sha256="1" * 64)
    assert judge(with_drop(bad, 0.0)).status == "verified"
    assert judge(with_drop(bad, 0.005)).status == "dropped"  # it is not known
    others = {"sure": 0.0, "unsure": 0.0}
    assert judge(with_accuracy(bad, TOP1, others)).status == "dropped"  # not of the ensemble


def test_a_record_of_other_networks_or_of_fewer_members_counts_for_nothing(manifest, others):
    other = changed(with_drop(manifest, 0.1), members=others.members)
    assert current_records(other) == []
    verdict = judge(other)
    assert verdict.status == "unmeasured"
    assert "for the networks that are there now" in verdict.message
    fewer = with_accuracy(changed(manifest, members=manifest.members[:1]), TOP1)
    assert judge(changed(fewer, members=manifest.members)).status == "unmeasured"


def test_networks_that_came_as_int8_have_nothing_to_be_compared_with(manifest):
    came = [m.model_copy(update={"imported_int8": True}) for m in manifest.members]
    all_came = changed(manifest, members=tuple(came))
    verdict = judge(with_accuracy(all_came, TOP1))
    assert verdict.status == "verified"
    assert "without float ones" in verdict.message
    assert judge(with_accuracy(all_came, TOP1, num_images=1)).status == "unknown"
    assert judge(all_came).status == "unmeasured"
    one_came = with_first(manifest, imported_int8=True)
    assert judge(with_accuracy(one_came, TOP1)).status == "unmeasured"


@pytest.mark.parametrize("what", CHANGES)
def test_a_record_says_nothing_of_a_set_that_has_changed_but_a_drop_refuses(manifest, what):
    measured = with_drop(manifest, 0.0)
    assert judge(measured).status == "verified"
    other = CHANGES[what](measured)
    verdict = judge(other)
    assert verdict.status == "unmeasured"
    assert f"as the set is now: {what} changed since it was measured" in verdict.message
    assert ASK in verdict.message
    assert (current_records(other), records_of_networks(other)) == ([], list(measured.accuracy))
    assert judge(CHANGES[what](with_drop(manifest, 0.1))).status == "dropped"


def test_a_drop_stays_with_the_int8_network_when_the_float_one_goes(manifest, floats):
    pairs = zip(manifest.members, floats.members, strict=True)
    both = [m.model_copy(update={"networks": {**m.networks, **f.networks}}) for m, f in pairs]
    bad = with_accuracy(changed(manifest, members=tuple(both)), TOP1, {"sure": 0.1})
    assert judge(bad).status == "dropped"
    assert judge(with_first(bad, networks=manifest.members[0].networks)).status == "dropped"


def test_float_networks_that_run_in_bf16_are_not_those_that_were_measured(manifest):
    verdict = judge(in_float(with_accuracy(changed(manifest, float_type="bf16"), TOP1)), "FP16")
    assert verdict.status == "unmeasured"
    assert "measured in f32" in verdict.message


def quantised(manifest: Manifest, drop: float, num_images: int = 400) -> Manifest:
    """As if tandem quantize had measured that of the member called sure."""
    measured = ValidationDrop(
        dataset="colours/validation",
        images_sha256="3" * 64,
        num_images=num_images,
        measured=date(2026, 1, 1),
        fingerprint=manifest.members[0].networks["INT8"].fingerprint,
        drop=drop_of(drop, num_images),
    )
    return with_first(manifest, validation_drop=measured)


def test_a_drop_that_quantising_measured_refuses_and_one_within_the_limit_verifies_nothing(
    manifest,
):
    verdict = judge(quantised(manifest, 0.02))
    assert verdict.status == "dropped"
    assert "costs sure 2.00 points of top-1 on colours/validation (400 images)" in verdict.message
    assert "or find otherwise on 400 images or more (tandem evaluate tiny)" in verdict.message
    assert judge(quantised(manifest, 0.02), "FP16").status == "unmeasured"
    for drop in (-0.1, 0.0, 0.005, 0.0075):  # or it may be chance
        assert judge(quantised(manifest, drop)).status == "unmeasured"


def test_an_evaluation_of_as_many_images_overrules_what_quantising_measured(manifest):
    evaluated = with_drop(manifest, 0.0, num_images=400)
    assert judge(quantised(evaluated, 0.1, num_images=400)).status == "verified"
    assert judge(quantised(evaluated, 0.1, num_images=401)).status == "dropped"
    some = with_accuracy(manifest, TOP1, {"unsure": 0.0, "ensemble": 0.0}, num_images=400)
    assert judge(quantised(some, 0.1, num_images=100)).status == "dropped"


def test_a_drop_counts_for_its_own_int8_network_and_no_float_one(manifest, others):
    old = quantised(manifest, 0.1).members[0].validation_drop
    assert judge(with_first(others, validation_drop=old)).status == "unmeasured"
    bad = with_drop(manifest, 0.1)
    assert judge(in_float(bad), "FP16").status == "verified"
    assert judge(bad, "FP16").status == "unmeasured"


def test_a_record_replaces_that_of_the_same_images_and_survives_the_file(manifest, tmp_path):
    first = with_drop(manifest, 0.1, images_sha256="1" * 64)
    second = with_drop(first, 0.2, images_sha256="2" * 64)
    again = with_drop(manifest, 0.0, images_sha256="1" * 64).accuracy[0]
    kept = with_record(second, again).accuracy
    assert [(r.images_sha256[0], r.drops["ensemble"].top1) for r in kept] == [("2", 0.2), ("1", 0)]
    measured = with_accuracy(manifest, TOP1, drops(0.002))
    write_manifest(tmp_path, measured)
    assert read_manifest(tmp_path) == measured


def test_members_that_have_no_int8_are_judged_as_they_run(floats):
    """Float ONNX members run as they are when INT8 is asked for."""
    members = []
    for member in floats.members:
        network = member.networks["FP16"].model_copy(update={"runtime": "onnxruntime"})
        members.append(member.model_copy(update={"networks": {"FP16": network}}))
    assert {member.precision_of("INT8") for member in members} == {"FP16"}
    measured = in_float(with_accuracy(changed(floats, members=tuple(members)), TOP1))
    assert judge(measured, "INT8") == judge(measured, "FP16")
    assert judge(measured, "INT8").status == "verified"


def judgement(pair: Paired, max_drop: float = LIMIT, num_figures: int = 1):
    (only,) = judged({"ensemble": pair.drop}, pair.num_images, max_drop, num_figures)
    return only


@pytest.mark.parametrize("num_images", [1, 50, LEAST_IMAGES - 1])
def test_few_images_verify_nothing_though_all_answers_are_the_same(num_images):
    assert judgement(Paired(num_images, 0, 0)).outcome == "unknown"
    assert judgement(Paired(LEAST_IMAGES, 0, 0)).outcome == "verified"
    assert judgement(Paired(LEAST_IMAGES, 1, 1)).outcome == "unknown"


def test_the_bound_is_tighter_with_more_images_and_never_lets_two_points_pass():
    bounds = [bound(LIMIT, n) for n in (1, 50, 112, 400, 1000, 1451, 10_000, 10**6)]
    assert (bounds, bounds[0], bound(LIMIT, 1000)) == (sorted(bounds, reverse=True), 0.02, 0.01)
    assert bounds[-1] == pytest.approx(LIMIT, abs=2e-4)


@cases(
    "pair, outcome",
    (Paired(1000, 10, 0), "refused"),  # one point, and no image the other way
    (Paired(1000, 40, 30), "unknown"),  # as much, among many differences
    (Paired(10_000, 400, 300), "refused"),  # on ten times as many it is no chance
    (Paired(1000, 5, 0), "unknown"),  # half a point: not over the limit, its interval is
    (Paired(1000, 2, 2), "verified"),
    (Paired(1000, 0, 50), "verified"),  # INT8 is better
    (Paired(5, 5, 0), "unknown"),  # 1 of 16 by chance
    (Paired(8, 8, 0), "refused"),
)
def test_a_loss_is_refused_if_it_is_over_the_limit_and_no_chance(pair, outcome):
    assert judgement(pair).outcome == outcome


def test_one_refuses_all_verify_and_more_members_need_more_evidence():
    pair = Paired(1000, 7, 0)  # p = 2 / 2^7
    assert judgement(pair, num_figures=3).outcome == "refused"
    assert judgement(pair, num_figures=4).outcome == "unknown"
    good, bad, few = Paired(1000, 2, 2).drop, Paired(1000, 30, 0).drop, Paired(1000, 5, 0).drop
    assert outcome_of(judged({"a": good, "b": good}, 1000, LIMIT)) == "verified"
    assert outcome_of(judged({"a": good, "b": few}, 1000, LIMIT)) == "unknown"
    assert outcome_of(judged({"a": few, "b": bad}, 1000, LIMIT)) == "refused"
    assert outcome_of([]) == "unknown"


@cases(
    "pair",
    *(Paired(21, 0, 0), Paired(100, 1, 0), Paired(400, 9, 8)),
    *(Paired(700, 20, 15), Paired(1451, 60, 50), Paired(1451, 14, 8)),
)
def test_so_many_images_more_would_tell_if_they_went_on_alike(pair):
    said = judgement(pair)
    assert said.outcome == "unknown"

    def after(num_more: float) -> str:
        times = (pair.num_images + num_more) / pair.num_images
        counts = (ceil(v * times) for v in (pair.num_images, pair.only_first, pair.only_second))
        return judgement(Paired(*counts)).outcome

    assert after(1.3 * said.num_more) != "unknown"
    assert after(0.4 * said.num_more) == "unknown"


def test_the_images_that_would_refuse_are_those_of_a_two_sided_test():
    """One point lost of 1,000, 7 % differing: 1.96^2 (0.07 - 0.01^2) / 0.01^2 are 2,685 images."""
    said = judgement(Paired(1000, 40, 30))
    assert 2685 <= 1000 + said.num_more <= 2685 * 1.1  # in steps of 5 %, and rounded up
    assert judgement(Paired(100_000, 5500, 5000)).num_more is None  # just the limit: never certain


@cases("num_images, num_figures, num_more", (3, 1, 3), (4, 1, 2), (5, 2, 2))
def test_the_images_that_would_refuse_where_all_are_lost(num_images, num_figures, num_more):
    """All lost: n images refuse from 2^(1 - n) <= 0.05 / figures, so from 6 (one) or 7 (two)."""
    pair = Paired(num_images, num_images, 0)
    assert judgement(pair, num_figures=num_figures).num_more == num_more


@cases("number, rounded", (0.4, 1), (99, 99), (100, 100), (101, 110), (98765, 99000))
def test_numbers_of_images_are_round(number, rounded):
    assert rounded_up(number) == rounded


def scores_drop(lost: float, half: float) -> MultiLabelDrop:
    return MultiLabelDrop(
        mean_average_precision=0.0,
        mean_average_precision_interval=(-half, half),
        micro_f1=lost,
        micro_f1_interval=(lost - half, lost + half),
    )


@cases(
    "drop, num_images, outcome",
    (scores_drop(0.02, 0.012), 1000, "refused"),
    (scores_drop(0.02, 0.018), 1000, "unknown"),  # excludes no loss alone, not as one of two
    (scores_drop(0.0, 0.008), 1000, "verified"),
    (scores_drop(0.0, 0.0), 24, "unknown"),  # no spread, since too few images to have one
    (scores_drop(0.0, 0.0), LEAST_IMAGES - 1, "unknown"),
    (scores_drop(0.0, 0.0), LEAST_IMAGES, "verified"),
    (scores_drop(0.5, 0.0), 1, "unknown"),
    (scores_drop(0.5, 0.0), 24, "refused"),
)
def test_both_figures_of_a_multi_label_set_are_judged(drop, num_images, outcome):
    assert outcome_of(judged({"ensemble": drop}, num_images, LIMIT)) == outcome
