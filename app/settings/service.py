"""All settings of a service, the checks between them, and the settings of each of its sets."""

import platform
from typing import Annotated, Any, Literal, Self

from platformdirs import user_cache_path
from pydantic import ConfigDict, Field, field_validator, model_validator

from app.setting_values import (
    RETIRED,
    CachePlace,
    FunctionName,
    Origins,
    UserPath,
    check_form_fits,
)
from app.settings.limits import LimitSettings
from app.settings.records import RecordSettings
from app.settings.sets import SetSettings
from models.model_set import ModelSet, load_model_set
from models.record import Precision
from models.user_folders import user_folder

IS_X86 = platform.machine() in ("x86_64", "AMD64")  # on others INT8 may be emulated, or inexact
Place = Literal["gateway", "deployment"]
AnswerPolicy = Literal["all", "quorum", "any"]


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
    cascade_margin: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="answer an image by the first member alone if its two highest probabilities "
        "differ by at least this; null: always ask all members",
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
    preprocess: FunctionName = Field(
        None,
        description="your own function between the Decoder and the members, from pixels to "
        "pixels: package.module:function; null: none",
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
    decode_threads: int = Field(2, ge=1, description="images decoded at a time per Decoder")
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
        description="file of API keys, a KEY or NAME:KEY on each line; only requests with one of "
        "them, or of the variable TANDEM_API_KEYS, are answered; it is read again when it changes; "
        "null: no file",
    )
    allowed_origins: Origins = Field(
        (),
        description="origins of web pages that may call the service from a browser (CORS): "
        'https://shop.example, without a path, or "*" for all; API keys are still checked',
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
        if self.combine is not None and self.cascade_margin is not None:
            raise ValueError(
                f"combine is {self.combine} and cascade_margin {self.cascade_margin:g}: a cascade "
                "answers some images by the first member alone, without combine; leave one of "
                "them out"
            )
        return self

    @field_validator("shared_memory", mode="before")
    @classmethod
    def _shared_memory_is_without_a_proxy(cls, value: object) -> object:
        if value is True:
            raise ValueError(
                "true is refused: clients of a proxy on this machine look local, and could read "
                "and write shared memory; if there is no proxy in front, set shared_memory: "
                "unproxied"
            )
        return value

    @property
    def served_precision(self) -> Precision:
        """The networks' precision: INT8 for ``auto``, until :mod:`app.precision` has decided."""
        return "INT8" if self.precision == "auto" else self.precision

    def of_each_set(self) -> list["Settings"]:
        """Return the settings of each set's graph, in the order of the sets.

        A Gateway's limits of requests, bytes and cache are divided evenly between the sets, so
        that load on one set cannot use up the limits of the others.
        """
        if not self.has_several_sets:
            return [self]
        names = self.model_sets or ()
        num = len(names)
        shares = {
            "cache_mib": max(1, self.cache_mib // num),
            "max_concurrent_requests": max(1, self.max_concurrent_requests // num),
            "max_bytes_in_flight": max(self.max_body_bytes, self.max_bytes_in_flight // num),
        }
        return [self.model_copy(update={**shares, "model_set": name}) for name in names]

    def of_one_more(self, name: str) -> "Settings":
        """Return the settings of one more set, loaded at run time, with an even share."""
        names = (*(self.model_sets or (self.model_set,)), name)
        several = self.model_copy(update={"model_sets": names, "weights": None})
        return several.of_each_set()[-1]

    def load_set(self) -> ModelSet:
        """Load ``model_set``, with only the members that ``weights`` name if it is set."""
        of = None if self.precision == "auto" else self.precision  # None: a version of either
        loaded = load_model_set(self.model_set, self.model_search, of)
        return loaded if self.weights is None else loaded.weighted(self.weights)
