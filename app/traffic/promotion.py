"""The gate of ``tandem traffic promote``: reasons against a version that is to answer alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import BadParameterError
from models.accuracy import wilson_interval

MIN_COMPARED = 200  # photos; if all 200 agree, the 95 % interval begins at 0.981
MIN_AGREEMENT = 0.95
MAX_FAILED = 0.01  # of a version's answers to clients


def candidate(status: Mapping[str, Any], asked: str | None) -> str:
    """Return the version to promote: ``asked``, or the only version in traffic besides the main.

    Args:
        status: the answer of ``GET /v1/traffic``.
        asked: NAME@VERSION that the user asked for, or None.

    Raises:
        BadParameterError: ``asked`` is not loaded or answers every request already; or nothing
            was asked for and there are several candidates, or none.

    """
    shares: dict[str, float] = status["shares"]
    main: str = status["main"]
    others: list[str] = [name for name in status["versions"] if name != main]
    if asked is not None:
        if asked == main and shares[main] == 100:
            raise BadParameterError(f"{asked} answers every request already")
        if asked not in status["versions"]:
            raise BadParameterError(
                f"{asked} is not loaded; there are {', '.join(status['versions'])}"
            )
        return asked
    in_traffic = [name for name in others if shares.get(name) or name == status.get("shadow")]
    if len(in_traffic) == 1:
        return in_traffic[0]
    names = ", ".join(in_traffic or others) or "none"
    raise BadParameterError(f"name a version: {main} answers most requests, and there are {names}")


def refusals(
    status: Mapping[str, Any], version: str, min_compared: int, min_agreement: float
) -> list[str]:
    """Return the reasons against promoting ``version``, each with figures; empty if it may be.

    Args:
        status: the answer of ``GET /v1/traffic``.
        version: NAME@VERSION.
        min_compared: how many photos both it and the main version must have answered.
        min_agreement: what the lower end of the agreement's 95 % interval must reach, 0 to 1.

    """
    main, figures = status["main"], status["versions"][version]
    reasons = []
    if (refused := figures.get("refused")) is not None:
        reasons.append(refused)
    if version == main:
        return reasons  # the main version is the reference: there is nothing to compare it with
    failed, copies_failed = int(figures["failed"]), int(figures["copies_failed"])
    if failed > MAX_FAILED * (answers := figures["answered"] + failed):
        reasons.append(
            f"{failed} of its {answers} answers to clients failed, {failed / answers:.1%}: more "
            f"than {MAX_FAILED:.1%}; the service's log says why"
        )
    pairs: Sequence[Mapping[str, Any]] = status["comparisons"]
    pair = next((p for p in pairs if (p["reference"], p["version"]) == (main, version)), None)
    compared = 0 if pair is None else int(pair["compared"])
    if compared < min_compared:
        reasons.append(
            f"{compared} photos were compared with {main}, {min_compared - compared} fewer than "
            f"{min_compared}: wait, or lower --min-compared"
        )
    if not (copied := compared + copies_failed):
        return reasons
    agreed = 0 if pair is None else int(pair["agreed"])
    low, _ = wilson_interval(agreed, copied)
    if low < min_agreement:
        and_failed = f" and {copies_failed} that it failed on" if copies_failed else ""
        reasons.append(
            f"it agrees with {main} on {agreed} of {compared} photos{and_failed}, "
            f"{agreed / copied:.1%} (95 %: from {low:.1%}): {min_agreement - low:.1%} below "
            f"{min_agreement:.1%} (--min-agreement)"
        )
    return reasons
