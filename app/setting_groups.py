"""Groups of settings that parts of the service get alone: limits, and what a service records."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from app.environment import MIB
from app.setting_values import (
    NO_TRACE_FILES,
    check_sample_place,
    check_teach_place,
    check_trace_endpoint,
)
from models.image import DEFAULT_MAX_FULL_PIXELS, DEFAULT_MAX_PIXELS

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class LimitSettings(BaseModel):
    """Limits in bytes, pixels, files, requests and seconds."""

    max_body_bytes: Count = Field(
        20 * MIB, description="largest body of a request with all its files, in bytes"
    )
    max_bytes_in_flight: Count = Field(
        256 * MIB, description="bytes of bodies that a Gateway holds at a time; beyond it is 429"
    )
    max_pixels: Count = Field(DEFAULT_MAX_PIXELS, description="largest width x height of an image")
    max_full_pixels: Count = Field(
        DEFAULT_MAX_FULL_PIXELS,
        description="largest width x height of an image that cannot be decoded at reduced scale "
        "(PNG, WebP); images with 16-bit samples count twice",
    )
    max_heavy_pixels: Count = Field(
        128 * MIB,
        description="pixels that a Decoder holds at full scale at a time, at most; images up to 2 "
        "Mi pixels do not count; further images get 429",
    )
    max_files: Count = Field(64, description="files in one multipart request, at most")
    max_concurrent_requests: Count = Field(
        128, description="requests under way per Gateway, at most; further ones get 429"
    )
    target_wait_ms: float | None = Field(
        50.0,
        ge=0,
        le=10_000,
        description="how long an admitted request may wait for free cores in overload; the "
        "Gateway lowers its limit of requests to keep it, if the members run in its process; "
        "null: max_concurrent_requests is the limit in overload too",
    )
    max_queued_images: Count = Field(
        512,
        description="images that wait for a member's replica, at most; a quarter of the places is "
        "kept for requests with a single image",
    )
    default_top_k: Count = Field(
        5, description="classes in an answer without top_k; never more than the set has"
    )
    request_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="time limit of a request; a client may ask for less"
    )
    answer_timeout_s: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="time limit of the answer, from the end of the body on; null: the rest of "
        "request_timeout_s, and on a cluster at most 0.8 of the time after which HAProxy asks "
        "another Gateway",
    )


TraceExporter = Literal["otlp", "jaeger", "none"]


class RecordSettings(BaseModel):
    """Samples and feedback, which are off by default, and traces."""

    sample_ratio: Share = Field(
        0.0,
        description="share of the answered images that is written to sample_dir with the answer; "
        "a hash of the request id and of the image's place in the request decides",
    )
    sample_dir: str | None = Field(
        None,
        description="folder or store's URL (s3://, gs://, az://) that samples are written to, and "
        "with traffic or shadow also photos that versions disagree on; photos are written as they "
        "were sent, and may be personal data",
    )
    sample_mib: Count = Field(
        1024,
        description="largest size of all samples in a folder, where the oldest are removed; in a "
        "store, of what each Gateway writes a day; with traffic or shadow a quarter is kept for "
        "disagreements",
    )
    sample_days: Count | None = Field(
        None, description="days after which samples are removed; null: they stay while they fit"
    )
    feedback: bool = Field(
        False,
        description="accept the right labels of earlier answers (POST /v1/feedback), and report "
        "each version's accuracy (GET /v1/feedback)",
    )
    feedback_answers: Count = Field(
        50_000, description="answers that are remembered for feedback, the newest ones"
    )
    teach: bool = Field(
        False,
        description="take labelled photographs (POST /v1/teach), and keep them in teach_dir for "
        "tandem learn --corrections; with feedback also the labels that it brings",
    )
    teach_dir: str | None = Field(
        None,
        description="folder for photographs that are taught; each node has its own, unless it is "
        "shared; they are kept as they were sent, and may be personal data",
    )
    teach_mib: Count = Field(
        512, description="largest size of teach_dir; beyond it photographs are refused with 409"
    )
    teach_photographs: Count = Field(
        10_000, description="photographs in teach_dir, at most; beyond it they are refused with 409"
    )
    trace_exporter: TraceExporter = Field(
        "otlp",
        description="how traces are sent: otlp (any collector, Jaeger from 1.35 on), jaeger "
        "(Thrift, for older versions of Jaeger), none",
    )
    trace_endpoint: str | None = Field(
        None,
        description="address that the exporter sends to; otlp: http://HOST:4317 (gRPC) or "
        "http://HOST:4318; jaeger: udp://HOST:6831 or http://HOST:14268; null: the address in "
        "OpenTelemetry's environment variables; without an address otlp sends nothing, and jaeger "
        "sends to this machine",
    )

    @property
    def keeps_photographs(self) -> bool:
        """Whether photographs of callers are kept, which can be erased."""
        return self.sample_dir is not None or self.teach

    @field_validator("trace_exporter", mode="before")
    @classmethod
    def _traces_are_sent(cls, value: object) -> object:
        if value == "file":
            raise ValueError(f"file is no exporter any more: {NO_TRACE_FILES}")
        return value

    @model_validator(mode="after")
    def _records_have_a_place(self) -> Self:
        check_trace_endpoint(self.trace_exporter, self.trace_endpoint)
        check_sample_place(self.sample_ratio, self.sample_dir)
        check_teach_place(self.teach_dir, is_on=self.teach)
        return self
