"""Answers for one image, as the graph makes them."""

from app.answers import Classified, MemberOpinion, Timings
from models.ensemble import Prediction

VERSION = "0123456789ab"


def answer_of(members="ab", *, agreement=True, degraded=False, skipped="", sure=None, timings=None):
    """Return the answer of members with names of one letter."""
    row = Prediction(index=0, label="x", probability=0.9)
    opinion = MemberOpinion(label="x", probability=0.9, predictions=[row])
    return Classified(
        model_set="fake",
        model_version=VERSION,
        predictions=[row],
        members=dict.fromkeys(members, opinion),
        agreement=agreement,
        degraded=degraded,
        sure=sure,
        skipped_members=list(skipped) or None,
        request_id="1",
        timings_ms=timings or Timings(total=10, stages=[]),
    )
