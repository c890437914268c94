"""Settings that name the served model sets and their versions."""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, model_validator

from app.setting_values import UserPaths, check_shares, set_in_traffic
from models.model_set import search_path
from models.record import Weight


class SetSettings(BaseModel):
    """One set, several that share a service, or versions of one that share its traffic."""

    model_set: str = Field(
        "imagenette",
        description="the served model set: its name, its folder, or its URL in a store (s3://, "
        "gs://, az://, hf://, https://); NAME@VERSION is a version of it",
    )
    model_sets: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="several served sets instead of model_set, which share the service's cores; a "
        "request names a set, or gets the first; null: model_set alone",
    )
    traffic: dict[str, float] | None = Field(
        None,
        min_length=1,
        description="percentage of requests that each version of a set answers, by NAME@VERSION, "
        "100 in sum; leave model_set out, or let it name the same set; null: model_set alone",
    )
    shadow: str | None = Field(
        None,
        description="another version of the set, NAME@VERSION, that gets copies of requests while "
        "the service is not busy, and answers no client; null: none",
    )
    traffic_header: str | None = Field(
        None,
        pattern=r"^[a-z0-9-]{1,64}$",
        description="request header, in lower case (x-user-id), whose value decides which version "
        "of traffic answers; null: the image decides",
    )
    compare_ratio: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of requests that a second version also computes while several versions "
        "answer, to compare both on the same images",
    )
    open_traffic: bool | None = Field(
        None,
        description="whether clients may change the traffic (PUT /v1/traffic) of a service "
        "without API keys; null: only if tandem serve listens on loopback, never on a cluster",
    )
    unload_after_s: float | None = Field(
        None,
        gt=0,
        description="unload the networks of a set other than the first after this time without a "
        "request; the next request for it waits until they are loaded again; null: never",
    )
    set_weights: dict[str, Weight] | None = Field(
        None,
        min_length=1,
        description="weight of each set's share of the cores, by its name, while images of several "
        "sets wait; 1 for a set without a weight; null: equal shares",
    )
    model_dirs: UserPaths = Field(
        (), description="folders that are searched for sets before the bundled sets"
    )
    weights: dict[str, Weight] | None = Field(
        None,
        min_length=1,
        description="the served members by name, each with its weight in the average of "
        "probabilities; null: all members, with the manifest's weights",
    )

    @model_validator(mode="before")
    @classmethod
    def _sets_are_named_once(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("model_sets") is None:
            return values
        if values.get("model_set") is not None:
            raise ValueError(
                "model_set and model_sets both name the served sets: leave one of them out"
            )
        names = values["model_sets"]
        return (
            {**values, "model_set": names[0]}
            if isinstance(names, list | tuple) and names
            else values
        )

    @model_validator(mode="before")
    @classmethod
    def _traffic_names_the_set(cls, values: Any) -> Any:
        """Take the version with the largest share as ``model_set``."""
        shares = values.get("traffic") if isinstance(values, dict) else None
        if not isinstance(shares, dict) or not shares or values.get("model_sets") is not None:
            return values
        try:
            main = max(shares, key=lambda name: float(shares[name]))
        except (TypeError, ValueError):  # the check of the field reports it
            return values
        return {**values, "model_set": set_in_traffic(values.get("model_set"), main)}

    @model_validator(mode="after")
    def _versions_share_one_process(self) -> Self:
        if self.traffic is not None:
            check_shares(self.traffic)
        if not self.has_versions:
            return self
        for stage in ("decoder", "members", "combiner"):
            if getattr(self, stage) == "deployment":
                raise ValueError(
                    f"traffic or shadow is set and {stage} is deployment: versions only run in "
                    "the Gateway's process; leave one of them out"
                )
        if self.has_several_sets or self.weights is not None:
            raise ValueError(
                "traffic and shadow name versions of one set, with their manifests' weights: leave "
                "out model_sets and weights"
            )
        return self

    @model_validator(mode="after")
    def _several_sets_share_one_process(self) -> Self:
        if not self.has_several_sets:
            return self
        for stage in ("decoder", "members", "combiner"):
            if getattr(self, stage) == "deployment":
                raise ValueError(
                    f"model_sets has {len(self.model_sets or ())} sets and {stage} is deployment: "
                    f"several sets only run in the Gateway's process; leave {stage} out, or serve "
                    "one set"
                )
        if self.weights is not None:
            raise ValueError(
                "weights names members of one set, and model_sets has several; leave one of them "
                "out, or write the weights into the sets' manifests"
            )
        return self

    @property
    def model_search(self) -> tuple[Path, ...]:
        return search_path(self.model_dirs)

    @property
    def has_several_sets(self) -> bool:
        """Whether a Gateway serves several sets."""
        return len(self.model_sets or ()) > 1

    @property
    def has_versions(self) -> bool:
        """Whether several versions of a set are served: in the traffic, or as a shadow."""
        return self.traffic is not None or self.shadow is not None

    def of_each_version(self) -> list[Self]:
        """Return the settings of each version's graph, ``model_set``'s first."""
        shadow = [self.shadow] if self.shadow is not None else []
        names = dict.fromkeys((self.model_set, *(self.traffic or {}), *shadow))
        return [self.model_copy(update={"model_set": name}) for name in names]
