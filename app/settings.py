"""The settings of the application: ``args`` in serve_config.yaml.

Serve's own options (replicas, autoscaling, ports) stay in serve_config.yaml.
"""

import platform
from pathlib import Path
from typing import Annotated, Literal, Self

from platformdirs import user_cache_path, user_state_path
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.environment import MIB
from app.setting_values import (
    check_cache_address,
    check_form_fits,
    check_function_name,
    check_origin,
    check_trace_endpoint,
)
from models.image import DEFAULT_MAX_FULL_PIXELS, DEFAULT_MAX_PIXELS
from models.model_set import ModelSet, load_model_set, search_path
from models.record import Precision, Weight
from models.user_folders import user_folder

IS_X86 = platform.machine() in ("x86_64", "AMD64")  # elsewhere INT8 may be emulated, or wrong
Place = Literal["gateway", "deployment"]
AnswerPolicy = Literal["all", "quorum", "any"]
TraceExporter = Literal["otlp", "jaeger", "file", "none"]


class Settings(BaseModel):
    """What ``app.main:build`` takes; a key it does not know is refused."""

    # Serve prints what pydantic says of a wrong value: not the value, which may hold a password.
    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True
    )

    model_set: str = Field(
        "imagenette",
        description="name of a model set, or its folder's path; NAME@VERSION: in that version",
    )
    model_dirs: tuple[Path, ...] = Field((), description="searched for sets before the bundled")
    weights: dict[str, Weight] | None = Field(
        None,
        min_length=1,
        description="the members that are served, by name, and what each one's row weighs in the "
        "average; null: all, with the manifest's weights",
    )
    precision: Literal["INT8", "FP16", "auto"] = Field(
        "INT8" if IS_X86 else "auto",
        description="which of the set's networks are served; auto, the default on what is no "
        "x86-64: INT8, or FP16 where its golden check fails on the machine that starts the service",
    )
    allow_unverified: bool = Field(
        False, description="serve INT8 even if it lost more accuracy than the set's max_drop"
    )
    cascade_margin: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="skip the other members when the first one's best two probabilities differ by "
        "this or more; null: never",
    )
    answer_policy: AnswerPolicy = Field(
        "all",
        description="which members must answer: all, quorum (more than half) or any; what is "
        "missing makes the answer degraded, and says so",
    )
    member_patience_s: float = Field(
        1.0,
        ge=0,
        le=60,
        description="how long the other members are waited for once enough have answered",
    )
    preprocess: str | None = Field(
        None,
        description="the operator's own function from pixels to pixels, package.module:function, "
        "between the Decoder and the members; null: none",
    )
    combine: str | None = Field(
        None,
        description="the operator's own function from the members' rows to the ensemble's, "
        "package.module:function; null: the weighted average",
    )
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=256)], ...] = Field(
        (1, 3, 8), min_length=1, description="compiled batch sizes; a batch is padded up"
    )
    backlog_batches: bool = Field(
        True,
        description="while a backlog waits, batches of twice the largest size too; they are "
        "compiled when there first is one, and take memory from then on",
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
        description="call the Decoder's and the members' replicas on the Gateway's own node over "
        "Unix-domain sockets; false: through Ray, as those of other nodes",
    )
    streams: int = Field(
        0, ge=0, description="batches that run at a time in a replica; 0: one on each of its cores"
    )
    affinity: bool = Field(
        False, description="each replica keeps to cores of its own, as many as its whole num_cpus"
    )
    decode_threads: int = Field(2, ge=1, description="images decoded at a time per Decoder")
    cache: str = Field(
        "none",
        description="where answers are kept, so that an image that was seen before is not "
        "computed again: none, local (in each Gateway's memory), or redis://HOST:PORT/DB (there "
        "too, for all Gateways)",
    )
    cache_mib: int = Field(
        64, ge=1, le=2**16, description="of answers in each Gateway's memory, if cache is set"
    )
    shared_memory: Literal[False, "unproxied"] = Field(
        False,
        description="unproxied: let callers on this machine pass tensors of the Open Inference "
        "Protocol in shared memory (system shared memory of Triton's); tandem serve on loopback "
        "only, and with no proxy in front, which would make its callers local",
    )
    compile_cache: Path | None = Field(
        user_folder(user_cache_path, "openvino"), description="compiled networks; null: no cache"
    )
    api_keys_file: Path | None = Field(
        None,
        description="only callers with a key of this file (one a line, or NAME:KEY), or of the "
        "variable TANDEM_API_KEYS, are let in; it is read again when it changes; null: no file",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="pages of these origins may call from a browser (CORS), with a key where one "
        'is wanted: https://shop.example, as its address bar has it without a path, or "*": all',
    )
    max_body_bytes: int = Field(20 * MIB, ge=1, description="of one request, all files together")
    max_bytes_in_flight: int = Field(
        256 * MIB,
        ge=1,
        description="of all bodies that a Gateway holds at a time; more are answered 429",
    )
    max_pixels: int = Field(DEFAULT_MAX_PIXELS, ge=1, description="width x height of one image")
    max_full_pixels: int = Field(
        DEFAULT_MAX_FULL_PIXELS,
        ge=1,
        description="of one that cannot be decoded at reduced scale (PNG, WebP); 16-bit samples "
        "count twice",
    )
    max_heavy_pixels: int = Field(
        128 * MIB,
        ge=1,
        description="of all images over 2 Mi such pixels that a Decoder has at a time; more are "
        "answered 429",
    )
    max_files: int = Field(64, ge=1, description="files in one multipart request")
    max_concurrent_requests: int = Field(
        128, ge=1, description="under way per Gateway; more are answered 429 at once"
    )
    target_wait_ms: float | None = Field(
        50.0,
        ge=0,
        le=10_000,
        description="while more requests come than are answered, as many are let in as keep the "
        "cores busy, and so many beside as are answered within this, where the members run in the "
        "Gateway's process; null: max_concurrent_requests then too",
    )
    max_queued_images: int = Field(
        512,
        ge=1,
        description="waiting per member and replica; a quarter of the places is for single images",
    )
    default_top_k: int = Field(5, ge=1, description="classes in an answer when not asked")
    request_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="a request's time; a client may ask for less"
    )
    answer_timeout_s: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="of it, for the answer once the body is there; null: all of it, on a cluster "
        "0.8 of what HAProxy waits for a Gateway before it asks another one",
    )

    trace_exporter: TraceExporter = Field(
        "otlp",
        description="where traces go: otlp (Jaeger since 1.35, any collector), jaeger (Thrift, for "
        "older ones), file (only trace_dir), none",
    )
    trace_endpoint: str | None = Field(
        None,
        description="of the exporter; null: OpenTelemetry's own variables, or this machine. otlp: "
        "http://HOST:4317 (gRPC) or http://HOST:4318; jaeger: udp://HOST:6831 or http://HOST:14268",
    )
    trace_dir: Path | None = Field(
        user_folder(user_state_path, "spans"),
        description="traces are kept here too, for tandem trace; null: not",
    )
    trace_mib: int = Field(64, ge=1, description="of traces in trace_dir; the oldest go")

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        for what, of_all, of_each in (
            ("body", "max_bytes_in_flight", "max_body_bytes"),
            ("picture", "max_heavy_pixels", "max_full_pixels"),
        ):
            room, needed = getattr(self, of_all), getattr(self, of_each)
            if room < needed:
                raise ValueError(
                    f"{of_all} is {room}, {of_each} {needed}: one {what} must have room; raise the "
                    "first"
                )
        check_form_fits(self.max_queued_images, self.max_files)
        check_trace_endpoint(self.trace_exporter, self.trace_endpoint)
        if self.combine is not None and self.cascade_margin is not None:
            raise ValueError(
                f"combine is {self.combine} and cascade_margin {self.cascade_margin:g}: a cascade "
                "answers some images by the first member alone, which is no combination of "
                "combine's; leave one of them out"
            )
        return self

    @field_validator("preprocess", "combine")
    @classmethod
    def _function_has_a_name(cls, given: str | None) -> str | None:
        if given is not None:
            check_function_name(given)
        return given

    @field_validator("shared_memory", mode="before")
    @classmethod
    def _shared_memory_is_without_a_proxy(cls, given: object) -> object:
        if given is True:
            raise ValueError(
                "true says too little: callers of a proxy on this machine (nginx as it comes) look "
                "local, and could read and write shared memory; where there is none in front, set "
                "shared_memory: unproxied"
            )
        return given

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_some(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for origin in given:
            check_origin(origin)
        return given

    @field_validator("cache")
    @classmethod
    def _cache_is_a_place(cls, given: str) -> str:
        if given not in ("none", "local"):
            check_cache_address(given)
        return given

    @property
    def model_search(self) -> tuple[Path, ...]:
        """Where model sets are looked for, in order."""
        return search_path(self.model_dirs)

    @property
    def served_precision(self) -> Precision:
        """The precision of the networks; ``auto`` is INT8 until :mod:`app.precision` decides."""
        return "INT8" if self.precision == "auto" else self.precision

    def load_set(self) -> ModelSet:
        """Load the set that is served: of the members that ``weights`` name, if it is given."""
        of = None if self.precision == "auto" else self.precision  # a version is of any, then
        found = load_model_set(self.model_set, self.model_search, of)
        return found if self.weights is None else found.weighted(self.weights)
