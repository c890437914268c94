"""Judges a model set by its accuracy records, and estimates its CPU cost per image.

A record refuses a set if it measured the same INT8 networks, whatever else of the set has changed
since. A record verifies a set only if its networks and conditions are unchanged (decision 0010).

Every measured loss varies by chance, so with few images a figure above or below ``max_drop`` proves
nothing. **Refused** requires a significant loss above ``max_drop``. **Verified** requires an
interval that ends below a bound, which is tighter with more images. Everything else is **unknown**
(decision 0011). ``tests/load/gate_simulation.py`` measures the rates of both errors.

Last is the expected CPU cost of an image in each stage, until it is measured. The members' cost is
in the manifest's accuracy record (``tandem evaluate``). The rest was measured for photos of 15 to
240 KB and 16 clients (tests/load/results/apart.json; two cores with AVX512-VNNI and AMX). The
figures include tracing of every request, 2 %, which clusters do not use (tracing.json).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Literal

from models.ensemble import PlanName
from models.manifest import ENSEMBLE, Manifest
from models.record import Z95, AccuracyRecord, Drop, Loss, MultiLabelDrop, Precision, ValidationDrop

Status = Literal["verified", "unmeasured", "unknown", "dropped"]
DropOutcome = Literal["refused", "verified", "unknown"]
SIGNIFICANCE = 0.05  # the probability that a set as good as float is refused for any of its figures
# An interval verifies if it ends less than this above max_drop, as a fraction: half a point at
# 1,000 images, since intervals shrink with the root of their number. MAX_SLACK keeps losses of two
# points from being verified.
SLACK, SLACK_IMAGES, MAX_SLACK = 0.005, 1000, 0.015
LEAST_IMAGES = 254  # fewer cannot verify with the usual max_drop, even without any difference
MOST_IMAGES = 10**7  # more are not requested


@dataclass(frozen=True)
class Verdict:
    """``verified``: serve; ``unmeasured``, ``unknown``: serve with a warning; ``dropped``: refuse.

    ``unknown``: measured with too few images to decide.
    """

    status: Status
    message: str


def records_of_networks(manifest: Manifest) -> list[AccuracyRecord]:
    """Return the records of the manifest's present networks, newest last.

    Conditions may have changed since. Then sizes and CPU times still hold, but accuracy may not.
    """
    now = {
        member.name: {p: network.fingerprint for p, network in member.networks.items()}
        for member in manifest.members
    }
    kept = (
        record
        for record in manifest.accuracy
        if record.fingerprints.keys() == now.keys()
        and all(by.items() <= now[name].items() for name, by in record.fingerprints.items())
    )
    return sorted(kept, key=lambda record: record.measured)


def current_records(manifest: Manifest) -> list[AccuracyRecord]:
    """Return the records of the present networks and conditions, newest last."""
    conditions = manifest.conditions
    return [r for r in records_of_networks(manifest) if r.conditions == conditions]


def ensemble_figures(manifest: Manifest, name: str) -> dict[Precision, float]:
    """Return the ensemble's figure ``name`` by precision, from the newest current record."""
    records = current_records(manifest)
    newest = records[-1].scores if records else {}
    figures = {p: scores[ENSEMBLE].figure for p, scores in newest.items() if ENSEMBLE in scores}
    return {p: value for p, (figure, value) in figures.items() if figure == name}


def judge(
    manifest: Manifest, precision: Precision = "INT8", argument: str | None = None
) -> Verdict:
    """Judge a set by all of its records.

    After a refusal, only another record with as many images can allow the set. ``argument`` is the
    set's name for commands in messages; None: the manifest's.
    """
    manifest = manifest.model_copy(update={"name": argument or manifest.name})
    runs = {member.precision_of(precision) for member in manifest.members}
    if len(runs) == 1:  # of float ONNX members alone there is no INT8
        (precision,) = runs
    if precision == "INT8" and (problem := _refusal(manifest)):
        return Verdict("dropped", problem)
    records = [r for r in current_records(manifest) if precision in r.scores]
    how = f"tandem evaluate {manifest.name} --images DIR measures it"
    if not records and (measured := _with_plan(manifest, precision)):
        costs = f"tandem evaluate {manifest.name} --images DIR measures what INT8 costs"
        return Verdict("unmeasured", f"{manifest.name}: {measured}; {costs}")
    if not records:
        stale = _why_stale(manifest, precision)
        problem = f"{manifest.name} has no accuracy record of {precision}{stale}; {how}"
        return Verdict("unmeasured", problem)
    if precision == "FP16" and manifest.float_type != "f32":
        return Verdict(
            "unmeasured",
            f"{manifest.name}: its float networks were measured in f32, but its manifest has them "
            f"run in {manifest.float_type}; remove float_type there, or compare the served "
            f"networks: tandem evaluate {manifest.name} --images DIR --url URL",
        )
    if precision == "FP16":
        return _judge_alone(manifest, records)
    if all(member.imported_int8 for member in manifest.members):
        came = "its networks came quantised, without float ones to be compared with"
        return _judge_alone(manifest, records, f"; {came}")
    if not (compared := [record for record in records if record.drops]):
        problem = f"{manifest.name}: INT8 was never compared with the float networks; {how}"
        return Verdict("unmeasured", problem)
    return _judge_compared(manifest, compared)


def _judge_compared(manifest: Manifest, records: Sequence[AccuracyRecord]) -> Verdict:
    for record in reversed(records):
        if outcome_of(_judgements(manifest, record)) == "verified":
            return _verified(manifest, record)
    unknown = {}  # by number of images; of equal ones the newest record
    for record in records:
        if open_ := [j for j in _judgements(manifest, record) if j.outcome == "unknown"]:
            unknown[record.num_images] = record, open_
    most, open_ = unknown[max(unknown)]  # the newest record is neither refused nor verified
    worst = max(open_, key=lambda j: j.num_more or float("inf"))
    more = f"About {worst.num_more:,}" if worst.num_more else "No number of"
    lost, high, limit = (_points(v) for v in (worst.loss.lost, worst.loss.high, worst.bound))
    return Verdict(
        "unknown",
        f"{manifest.name}: not known whether INT8 costs {worst.name} more than max_drop, "
        f"{_points(manifest.max_drop)} of {worst.loss.figure}: it lost {lost}, at most {high}, on "
        f"{most.num_images} images of {most.dataset}; {limit} at most would verify it. "
        f"{more} images more would tell: tandem evaluate {manifest.name} --images DIR",
    )


def _judge_alone(manifest: Manifest, records: Sequence[AccuracyRecord], note: str = "") -> Verdict:
    """Judge networks without others to compare with, by the number of images."""
    most = max(records, key=lambda record: record.num_images)
    if most.num_images >= LEAST_IMAGES:
        return _verified(manifest, most, note)
    return Verdict(
        "unknown",
        f"{manifest.name}: measured on {most.num_images} images of {most.dataset}, which is too "
        f"few to tell; {LEAST_IMAGES - most.num_images} more would: tandem evaluate "
        f"{manifest.name} --images DIR",
    )


def _verified(manifest: Manifest, record: AccuracyRecord, note: str = "") -> Verdict:
    measured = f"measured on {record.dataset}, {record.num_images} images, {record.measured}"
    return Verdict("verified", f"{manifest.name}: {measured}{note}")


def _with_plan(manifest: Manifest, precision: Precision) -> str | None:
    """Return what a search of the fast plan measured of all members together."""
    plan = None if manifest.is_multi_label else manifest.usable_plan(precision)
    if plan is None:
        return None
    top1, images = plan.judged.full_top1, f"{plan.judged.num_images} images of {plan.dataset}"
    return f"top-1 {top1:.4f} on {images}, when its fast plan was made ({plan.measured})"


def _why_stale(manifest: Manifest, precision: Precision) -> str:
    if not manifest.accuracy:
        return ""
    if not (stale := [r for r in records_of_networks(manifest) if precision in r.scores]):
        return " for the networks that are there now"
    if (before := stale[-1].conditions) is None:
        noted = " that says which image rule, labels and weights it was measured with"
        return f"{noted} (older versions of Tandem did not note them)"
    changed = ", ".join(before.changes(manifest.conditions))
    return f" as the set is now: {changed} changed since it was measured"


def bound(max_drop: float, num_images: int) -> float:
    """Return the highest upper end of a loss's interval that still verifies INT8."""
    return max_drop + min(MAX_SLACK, SLACK * sqrt(SLACK_IMAGES / num_images))


@dataclass(frozen=True)
class Judgement:
    """The judgement on a figure of a classifier, and its number of images."""

    name: str  # a member's, or ensemble
    loss: Loss
    num_images: int
    outcome: DropOutcome
    bound: float  # the interval must end below this to verify
    num_more: int | None  # roughly how many more images would decide; None: no number would


def _judgements(manifest: Manifest, record: AccuracyRecord) -> list[Judgement]:
    return judged(record.drops, record.num_images, manifest.max_drop)


def refused(manifest: Manifest, record: AccuracyRecord) -> list[Judgement]:
    """Return the judgements by which the record refuses the present INT8 networks."""
    now = {m.name: m.networks["INT8"].fingerprint for m in manifest.members if "INT8" in m.networks}
    then = {n: by["INT8"] for n, by in record.fingerprints.items() if "INT8" in by}
    same = {name for name, fingerprint in now.items() if then.get(name) == fingerprint}
    same |= {ENSEMBLE} if then == now else set()
    every = _judgements(manifest, record)
    return [each for each in every if each.outcome == "refused" and each.name in same]


def standing_refusals(manifest: Manifest) -> Iterator[tuple[AccuracyRecord, Judgement]]:
    """Yield the refusals of the present INT8 networks that no later record overrules."""
    for place, record in enumerate(manifest.accuracy):
        for judgement in refused(manifest, record):
            if not _is_overruled(manifest, judgement, record, manifest.accuracy[place + 1 :]):
                yield record, judgement


def _refusal(manifest: Manifest) -> str | None:
    """Return where the present INT8 networks lost too much: in an evaluation, or when quantised."""
    for record, judgement in standing_refusals(manifest):
        return _too_much(manifest, judgement, record)
    kept = [(m, m.validation_drop) for m in manifest.members if m.validation_drop]
    for member, validation in kept:
        network = member.networks.get("INT8")
        if network is None or validation.fingerprint != network.fingerprint:
            continue
        drops, limit = {member.name: validation.drop}, manifest.max_drop
        (judgement,) = judged(drops, validation.num_images, limit, len(kept))
        is_refused = judgement.outcome == "refused"
        if is_refused and not _is_overruled(manifest, judgement, validation, manifest.accuracy):
            return f"{_too_much(manifest, judgement, validation)}. So tandem quantize measured it"
    return None


def _is_overruled(
    manifest: Manifest,
    judgement: Judgement,
    refusing: AccuracyRecord | ValidationDrop,
    later: Sequence[AccuracyRecord],
) -> bool:
    """Whether a later evaluation, with at least as many images, overrules a refusal.

    With other images it must verify the figure: otherwise a few tries would give a lucky one. With
    the same images under other conditions it is enough that it does not refuse.
    """
    current = current_records(manifest)
    for record in later:
        if record not in current or record.num_images < refusing.num_images:
            continue
        about = judgement.name, judgement.loss.figure
        judgements = _judgements(manifest, record)
        outcomes = {j.outcome for j in judgements if (j.name, j.loss.figure) == about}
        is_same = record.images_sha256 == refusing.images_sha256
        if outcomes == {"verified"} or (is_same and outcomes == {"unknown"}):
            return True
    return False


def _too_much(
    manifest: Manifest, judgement: Judgement, measured: AccuracyRecord | ValidationDrop
) -> str:
    loss = judgement.loss
    return (
        f"{manifest.name}: INT8 costs {judgement.name} {_points(loss.lost)} of {loss.figure} on "
        f"{measured.dataset} ({measured.num_images} images), over the set's max_drop of "
        f"{_points(manifest.max_drop)} and more than chance; quantise it again (tandem quantize "
        f"{manifest.name}), serve the float networks (precision: FP16), accept it with "
        f"--allow-unverified, or find otherwise on {measured.num_images} images or more (tandem "
        f"evaluate {manifest.name})"
    )


def _points(fraction: float) -> str:
    return f"{fraction * 100:.2f} points"


def judged(
    drops: Mapping[str, Drop | MultiLabelDrop],
    num_images: int,
    max_drop: float,
    num_figures: int = 0,
) -> list[Judgement]:
    """Judge the figures of an evaluation; ``drops`` are by member name or ``ensemble``.

    A loss is significant if its p-value times the number of figures is within ``SIGNIFICANCE``
    (Bonferroni). So sets with more members are not refused more often by chance. ``num_figures`` is
    the number of all figures, if ``drops`` has only some of them.
    """
    losses = [(name, loss) for name, drop in drops.items() for loss in drop.losses]
    level = SIGNIFICANCE / max(1, num_figures, len(losses))
    return [_judged(name, loss, num_images, max_drop, level) for name, loss in losses]


def outcome_of(judgements: list[Judgement]) -> DropOutcome:
    """Return the common outcome: any refusal refuses, verification needs all."""
    outcomes = {judgement.outcome for judgement in judgements}
    if "refused" in outcomes:
        return "refused"
    return "verified" if outcomes == {"verified"} else "unknown"


def _judged(name: str, loss: Loss, num_images: int, max_drop: float, level: float) -> Judgement:
    limit = bound(max_drop, num_images)
    # A bound for N images, even if all of them, or none, changed (then a bootstrap has no spread):
    # the one-sided exact test of N images, and the score interval of no change.
    p_value = max(loss.p_value, 2.0 ** (1 - num_images))
    high = max(loss.high, loss.lost + Z95**2 / (num_images + Z95**2))
    outcome: DropOutcome = "unknown"
    if loss.lost > max_drop and p_value <= level:
        outcome = "refused"
    elif loss.lost <= max_drop and high <= limit:
        outcome = "verified"
    more = _num_more(loss, num_images, max_drop, level) if outcome == "unknown" else None
    return Judgement(name, loss, num_images, outcome, limit, more)


def _num_more(loss: Loss, num_images: int, max_drop: float, level: float) -> int | None:
    """Estimate how many more images would decide, if loss and differences stayed alike.

    Half a score interval is about z sqrt(v / n + z^2 / n^2), with v the variance of an image's
    difference. This is solved for v, and then evaluated for more images in steps of 5 %.
    """
    half = loss.high - loss.lost
    variance = max(0.0, half**2 * num_images / Z95**2 - Z95**2 / num_images)
    z_refused, total = -NormalDist().inv_cdf(level / 2), float(num_images)
    while (total := total * 1.05) < MOST_IMAGES:
        if loss.lost > max_drop:
            is_certain = loss.lost >= z_refused * sqrt(variance / total) and (
                2.0 ** (1 - total * loss.lost) <= level  # if INT8 is right nowhere else
            )
        else:
            high = loss.lost + Z95 * sqrt(variance / total + (Z95 / total) ** 2)
            is_certain = high <= bound(max_drop, round(total))
        if is_certain:
            return rounded_up(total - num_images)
    return None


def rounded_up(number: float) -> int:
    """Return the next higher number with at most two digits before its zeros."""
    step = 1
    while number / step > 100:
        step *= 10
    return int(-(-number // step)) * step


DECODE_CPU_MS = 1.8  # on the Gateway's threads
DECODER_CPU_MS = 2.4  # in its own process, with its calls
INPUT_CPU_MS = 0.3  # for each further input, if members differ (results/sizes.json)
# HTTP and the graph's calls, to stages in other processes or in the same one.
GATEWAY_APART_CPU_MS = 1.7
GATEWAY_TOGETHER_CPU_MS = 1.4
COMBINE_CPU_MS = 0.5
MEMBER_CPU_MS = 20.0  # of a member without a record
# A record measures full batches in one process. A member in its own process also has calls, and
# slightly smaller batches.
MEMBER_APART = 1.1
AROUND_CPU_MS = 0.55  # Ray's processes and HAProxy, which no replica reports


def member_cpu_ms(
    manifest: Manifest, precision: Precision, plan: PlanName = "full"
) -> dict[str, float]:
    """Return each member's CPU-ms per image in full batches, from the newest record.

    By the fast plan a member costs only the share of images that it is asked about; members that
    the plan never asks are left out.
    """
    guessed = {member.name: MEMBER_CPU_MS for member in manifest.members}
    costs = guessed | measured_cpu_ms(manifest, precision)
    fast = manifest.usable_plan(precision) if plan == "fast" else None
    return costs if fast is None else {n: costs[n] * share for n, share in fast.shares.items()}


def measured_cpu_ms(manifest: Manifest, precision: Precision) -> dict[str, float]:
    """Return the costs of :func:`member_cpu_ms` that a record has, by member."""
    runs = {member.name: member.precision_of(precision) for member in manifest.members}
    return {
        name: of[runs[name]]
        for record in records_of_networks(manifest)
        for name, of in record.cpu_ms_per_image.items()
        if name in runs and runs[name] in of
    }


def decoder_cpu_ms(manifest: Manifest) -> float:
    """Return the CPU-ms per image of a separate Decoder."""
    return DECODER_CPU_MS + _further_inputs_ms(manifest)


def _further_inputs_ms(manifest: Manifest) -> float:
    return INPUT_CPU_MS * (len(manifest.inputs.rules) - 1)


def gateway_cpu_ms(
    manifest: Manifest,
    precision: Precision,
    plan: PlanName = "full",
    *,
    decodes: bool,
    has_members: bool,
) -> float:
    """Return the Gateway's CPU-ms per image, with the stages in its process."""
    total = GATEWAY_TOGETHER_CPU_MS if has_members else GATEWAY_APART_CPU_MS
    if decodes:
        total += DECODE_CPU_MS + _further_inputs_ms(manifest)
    if has_members:
        total += sum(member_cpu_ms(manifest, precision, plan).values())
    return total
