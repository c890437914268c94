"""Settings of the records that a service keeps: samples, feedback and traces."""

from typing import Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from app.setting_values import NO_TRACE_FILES, check_sample_place, check_trace_endpoint

TraceExporter = Literal["otlp", "jaeger", "none"]


class RecordSettings(BaseModel):
    """Samples and feedback, which are off by default, and traces."""

    sample_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the answered images that is written to sample_dir with the answer; "
        "a hash of the request id and of the image's place in the request decides",
    )
    sample_dir: str | None = Field(
        None,
        description="folder or store's URL (s3://, gs://, az://) that samples are written to, and "
        "with traffic or shadow also photos that versions disagree on; photos are written as they "
        "were sent, and may be personal data",
    )
    sample_mib: int = Field(
        1024,
        ge=1,
        description="largest size of all samples in a folder, where the oldest are removed; in a "
        "store, of what each Gateway writes a day; with traffic or shadow a quarter is kept for "
        "disagreements",
    )
    feedback: bool = Field(
        False,
        description="accept the right labels of earlier answers (POST /v1/feedback), and report "
        "each version's accuracy (GET /v1/feedback)",
    )
    feedback_answers: int = Field(
        50_000, ge=1, description="answers that are remembered for feedback, the newest ones"
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
        return self
