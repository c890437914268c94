"""The plan of the traffic: each version's share of requests, and the shadow, which gets copies.

Versions are called NAME@FINGERPRINT. Plans are immutable: a change makes the next plan, which keeps
the earlier splits for a rollback.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from app.errors import BadParameterError, PlanChangedError
from app.setting_values import check_shares

MAX_EARLIER = 10  # splits that a plan keeps for rollbacks


@dataclass(frozen=True)
class Split:
    """The percentage of requests that each version answers, 100 in sum, and the shadow."""

    shares: Mapping[str, float]
    shadow: str | None = None

    def __post_init__(self) -> None:
        """Raise :class:`BadParameterError` if the shares are invalid."""
        try:
            check_shares(self.shares)
        except ValueError as error:
            raise BadParameterError(str(error)) from error
        if self.shadow is not None and self.shares.get(self.shadow):
            raise BadParameterError(
                f"{self.shadow} is the shadow and answers {self.shares[self.shadow]:g} % of "
                "requests; name another shadow, or leave it out"
            )

    @property
    def main(self) -> str:
        """The version that answers most requests; the first of several with equal shares."""
        return max(self.shares, key=lambda name: self.shares[name])

    @property
    def answering(self) -> tuple[str, ...]:
        """The versions with a share over 0."""
        return tuple(name for name, share in self.shares.items() if share > 0)

    @property
    def versions(self) -> tuple[str, ...]:
        """Every version that the split names, the shadow last."""
        shadow = [] if self.shadow is None else [self.shadow]
        return tuple(dict.fromkeys((*self.shares, *shadow)))

    def promoted(self, version: str) -> Self:
        """Return the split in which ``version`` answers every request."""
        shadow = None if self.shadow == version else self.shadow
        return replace(self, shares={version: 100.0}, shadow=shadow)

    def as_dict(self) -> dict[str, Any]:
        return {"shares": dict(self.shares), "shadow": self.shadow}

    @classmethod
    def of(cls, content: Any) -> Self:
        """Read :meth:`as_dict`'s form; ``shadow`` may be left out.

        Raises:
            BadParameterError: ``content`` has another form, or the shares are invalid.

        """
        if not isinstance(content, dict) or not isinstance(shares := content.get("shares"), dict):
            raise BadParameterError('send {"shares": {"NAME@VERSION": 95, ...}, "shadow": null}')
        for name, share in shares.items():
            if isinstance(share, bool) or not isinstance(share, int | float):
                raise BadParameterError(f"the share of {name[:80]} is no number: send a percentage")
        if not isinstance(shadow := content.get("shadow"), str | None):
            raise BadParameterError("shadow is not a string: send NAME@VERSION, or null")
        return cls({name: float(share) for name, share in shares.items()}, shadow)


@dataclass(frozen=True)
class Plan:
    """A split, its revision, and the earlier splits, the newest first.

    ``origin`` is a hash of the first split. While a new deploy replaces a service, it tells the
    plans of the two apart.
    """

    split: Split
    origin: str
    revision: int = 0
    earlier: tuple[Split, ...] = ()

    @classmethod
    def first(cls, split: Split) -> Self:
        """Return the first plan, of the split in the settings."""
        shares = {name: float(share) for name, share in split.shares.items()}
        text = json.dumps([shares, split.shadow], sort_keys=True)
        return cls(split, hashlib.sha256(text.encode()).hexdigest()[:12])

    @property
    def order(self) -> tuple[int, str]:
        """What the newest plan has most of: the revision, then its text.

        Two books may each have made a plan of one revision: everybody takes the same of them.
        """
        return self.revision, repr(self)  # of strings and numbers: the same in every process

    def merged(self, other: Self) -> Self:
        """Return the newer of two plans."""
        return max(self, other, key=lambda plan: plan.order)

    def check_seen(self, revision: int | None) -> None:
        """Raise :class:`PlanChangedError` if a change was made from another revision."""
        if revision not in (None, self.revision):
            raise PlanChangedError(
                f"the plan is at revision {self.revision}, and yours was made from {revision}: "
                "look at it again (tandem traffic), then change it"
            )

    def changed(self, split: Split) -> Self:
        """Return the next plan, with this split."""
        earlier = (self.split, *self.earlier)[:MAX_EARLIER]
        return replace(self, split=split, revision=self.revision + 1, earlier=earlier)

    def rolled_back(self) -> Self:
        """Return the next plan, with the split before this one.

        Raises:
            BadParameterError: this is the first plan.

        """
        if not self.earlier:
            raise BadParameterError(
                "there is no earlier plan: this is the plan that the service began with; change it "
                "with tandem traffic set"
            )
        split, *earlier = self.earlier
        return replace(self, split=split, revision=self.revision + 1, earlier=tuple(earlier))
