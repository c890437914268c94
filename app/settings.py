"""All settings of a service, the checks between them, and the settings of each of its sets."""

import platform
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from platformdirs import user_cache_path
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.setting_groups import Count, LimitSettings, RecordSettings, Share
from app.setting_values import (
    RETIRED,
    CachePlace,
    FunctionName,
    FunctionNames,
    Networks,
    Origins,
    UserPath,
    UserPaths,
    check_fast_fits,
    check_form_fits,
    check_shares,
    set_in_traffic,
)
from models.ensemble import PlanName
from models.files import user_folder
from models.image_colors import IccProfiles
from models.model_set import ModelSet, load_model_set, search_path
from models.record import Precision, Weight

STAGES = ("decoder", "members", "combiner")
IS_X86 = platform.machine() in ("x86_64", "AMD64")  # on others INT8 may be emulated, or inexact
Place = Literal["gateway", "deployment"]
AnswerPolicy = Literal["all", "quorum", "any"]


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
        None, description="another version, NAME@VERSION, that gets copies of requests; null: none"
    )
    traffic_header: str | None = Field(
        None,
        pattern=r"^[a-z0-9-]{1,64}$",
        description="request header, in lower case (x-user-id), whose value decides which version "
        "of traffic answers; null: the image decides",
    )
    compare_ratio: Share = Field(
        0.1,
        description="share of requests that a second version also computes while several versions "
        "answer, to compare both on the same images",
    )
    copy_share: Annotated[Share, Field(le=0.1)] = Field(
        0.02, description="compute guaranteed to copies, as a share of what answers take"
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
        names = values.get("model_sets") if isinstance(values, dict) else None
        if names is not None and values.get("model_set") is not None:
            raise ValueError(
                "model_set and model_sets both name the served sets: leave one of them out"
            )
        if isinstance(names, list | tuple) and names:
            return {**values, "model_set": names[0]}
        return values

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
        if (stage := self._stage_apart) is not None:
            raise ValueError(
                f"traffic or shadow is set and {stage} is deployment: versions only run in the "
                "Gateway's process; leave one of them out"
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
        if (stage := self._stage_apart) is not None:
            raise ValueError(
                f"model_sets has {len(self.model_sets or ())} sets and {stage} is deployment: "
                f"several sets only run in the Gateway's process; leave {stage} out, or serve one "
                "set"
            )
        if self.weights is not None:
            raise ValueError(
                "weights names members of one set, and model_sets has several; leave one of them "
                "out, or write the weights into the sets' manifests"
            )
        return self

    @property
    def _stage_apart(self) -> str | None:
        """The first stage that runs in replicas of its own."""
        return next((name for name in STAGES if getattr(self, name) == "deployment"), None)

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


class Settings(RecordSettings, LimitSettings, SetSettings):
    """The arguments of ``app.main:build``; unknown keys are refused."""

    # Serve logs pydantic's errors: hide the values in them, since the cache's may hold a password.
    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )

    precision: Literal["INT8", "FP16", "auto"] = Field(
        "INT8" if IS_X86 else "auto",
        description="precision of the served networks; auto (the default on CPUs other than "
        "x86-64) is INT8, or FP16 if INT8 fails its golden check on the machine that starts the "
        "service",
    )
    allow_unverified: bool = Field(
        False, description="serve INT8 even if it lost more accuracy than the set's max_drop"
    )
    plan: PlanName = Field(
        "full",
        description="how requests are answered that do not ask for a plan: full asks every member; "
        "fast asks fewer where fewer suffice, by the set's fast plan (tandem evaluate --plan)",
    )
    allowed_plans: tuple[PlanName, ...] = Field(
        ("full", "fast"),
        min_length=1,
        description="the plans that a request may ask for (plan=fast); fast, where the set has one",
    )
    when_full: Literal["refuse", "fast"] = Field(
        "refuse",
        description="what happens to requests when the service is about to refuse some: refuse, or "
        "fast: they are answered by the set's fast plan, and refused only beyond what that answers",
    )
    answer_policy: AnswerPolicy = Field(
        "all",
        description="how many members must answer: all, quorum (more than half) or any; an answer "
        "that lacks a member is marked degraded, and names the member",
    )
    member_patience_s: float = Field(
        1.0,
        ge=0,
        le=60,
        description="how long an answer waits for the remaining members once enough have answered",
    )
    icc_profiles: IccProfiles = Field(
        "ignore", description="convert: wide-gamut pictures become sRGB, by the extra color"
    )
    preprocess: FunctionName = Field(
        None,
        description="your own function from pixels to pixels: package.module:function; null: none",
    )
    set_functions: FunctionNames = Field(
        (), description="functions that model sets may name as their own preprocess"
    )
    combine: FunctionName = Field(
        None,
        description="your own function from the members' probabilities to the ensemble's: "
        "package.module:function; null: the weighted average",
    )
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=256)], ...] = Field(
        (1, 3, 8),
        min_length=1,
        description="batch sizes that are compiled; a batch is padded to the next of them",
    )
    backlog_batches: bool = Field(
        True,
        description="also use batches of twice the largest size while a backlog waits; they are "
        "compiled at the first backlog, and take memory from then on",
    )
    decoder: Place = Field(
        "gateway", description="where the Decoder runs: the Gateway's process, or its own replicas"
    )
    members: Place = Field(
        "gateway",
        description="where the networks run: the Gateway's process, or their own replicas",
    )
    combiner: Place = Field(
        "gateway", description="where the Combiner runs: the Gateway's process, or its own replicas"
    )
    local_channels: bool = Field(
        True,
        description="call replicas of the Decoder and the members on the Gateway's node over "
        "Unix-domain sockets; false: through Ray, as replicas on other nodes",
    )
    streams: int = Field(
        0, ge=0, description="batches that a replica runs at a time; 0: one on each of its cores"
    )
    decode_threads: Count = Field(2, description="images decoded at a time per Decoder")
    cache: CachePlace = Field(
        "none",
        description="where answers to repeated images are cached: none, local (in each Gateway's "
        "memory), or redis://HOST:PORT/DB (also in Redis, for all Gateways)",
    )
    cache_mib: int = Field(
        64, ge=1, le=2**16, description="size of the cache in each Gateway's memory"
    )
    shared_memory: Literal[False, "unproxied"] = Field(
        False,
        description="unproxied: clients on this machine may pass tensors of the Open Inference "
        "Protocol in shared memory (Triton's system shared memory); only for tandem serve on "
        "loopback without a proxy in front, which would make remote clients look local",
    )
    compile_cache: UserPath = Field(
        user_folder(user_cache_path, "openvino"),
        description="folder of compiled networks; null: compile them at each start",
    )
    api_keys_file: UserPath = Field(
        None,
        description="file of API keys, NAME:KEY:OPTIONS on each line, or YAML; only requests with "
        "one of them, or of TANDEM_API_KEYS, are answered; read again when it changes; null: none",
    )
    trusted_proxies: Networks = Field(
        (), description="networks of proxies (10.0.0.0/8) whose X-Forwarded-For names callers"
    )
    proxy_protocol: bool = Field(
        False,
        description="whether each connection begins with the PROXY protocol (v1 or v2), by which "
        "a balancer names the caller; needs HAProxy; close the ports to all but the balancer",
    )
    key_names_in_metrics: bool = Field(
        False, description="whether metrics name API keys; set where others cannot read them"
    )
    allowed_origins: Origins = Field(
        (),
        description="origins of web pages that may call the service from a browser (CORS): "
        'https://shop.example, without a path, or "*" for all; API keys are still checked',
    )

    operator_hints: bool | None = Field(
        None,
        description="whether the page and GET /v1/models show a set's hint, which names commands "
        "for who operates the service; null: only to this machine's own browsers and programs",
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_retired(cls, content: Any) -> Any:
        for name in RETIRED.keys() & content:
            raise ValueError(f"{name} is no setting any more: {RETIRED[name]}")
        return content

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        for what, of_all, of_each in (
            ("body", "max_bytes_in_flight", "max_body_bytes"),
            ("picture", "max_heavy_pixels", "max_full_pixels"),
        ):
            room, needed = getattr(self, of_all), getattr(self, of_each)
            if room < needed:
                raise ValueError(
                    f"{of_all} is {room} and {of_each} {needed}, so the largest {what} would not "
                    f"fit: raise {of_all}"
                )
        check_form_fits(self.max_queued_images, self.max_files)
        if self.plan not in self.allowed_plans:
            raise ValueError(
                f"plan is {self.plan} and allowed_plans {list(self.allowed_plans)}: add it there"
            )
        fast = next((n for n in ("plan", "when_full") if getattr(self, n) == "fast"), None)
        if fast is not None:
            check_fast_fits(fast, self.combine, self.weights)
        return self

    @field_validator("shared_memory", mode="before")
    @classmethod
    def _shared_memory_is_without_a_proxy(cls, value: object) -> object:
        if value is True:
            raise ValueError(
                "true is refused: clients of a proxy on this machine look local, and could read "
                "and write shared memory; if no proxy is in front, set shared_memory: unproxied"
            )
        return value

    @property
    def served_precision(self) -> Precision:
        """The networks' precision: INT8 for ``auto`` until ``app.graph.served_models`` decides."""
        return "INT8" if self.precision == "auto" else self.precision

    def of_each_set(self) -> list["Settings"]:
        """Return the settings of each set's graph, in the order of the sets.

        Limits of requests, bytes and cache are divided evenly: no set uses up another's.
        """
        if not self.has_several_sets:
            return [self]
        num = len(names := self.model_sets or ())
        shares = {
            "cache_mib": max(1, self.cache_mib // num),
            "max_concurrent_requests": max(1, self.max_concurrent_requests // num),
            "max_bytes_in_flight": max(self.max_body_bytes, self.max_bytes_in_flight // num),
        }
        return [self.model_copy(update={**shares, "model_set": name}) for name in names]

    def of_one_more(self, name: str) -> "Settings":
        """Return the settings of one more set, loaded at run time, with an even share."""
        names = self.model_sets or (self.model_set,)
        several = self.model_copy(update={"model_sets": (*names, name), "weights": None})
        return several.of_each_set()[-1]

    def load_set(self) -> ModelSet:
        """Load ``model_set``, with only the members that ``weights`` name if it is set."""
        of = None if self.precision == "auto" else self.precision  # None: a version of either
        loaded = load_model_set(self.model_set, self.model_search, of)
        return loaded if self.weights is None else loaded.weighted(self.weights)
