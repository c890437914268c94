"""Settings that limit what a service accepts at a time, and how long a request may take."""

from pydantic import BaseModel, Field

from app.environment import MIB
from models.image import DEFAULT_MAX_FULL_PIXELS, DEFAULT_MAX_PIXELS


class LimitSettings(BaseModel):
    """Limits in bytes, pixels, files, requests and seconds."""

    max_body_bytes: int = Field(
        20 * MIB, ge=1, description="largest body of a request with all its files, in bytes"
    )
    max_bytes_in_flight: int = Field(
        256 * MIB,
        ge=1,
        description="bytes of the bodies that a Gateway holds at a time, at most; further requests "
        "get 429",
    )
    max_pixels: int = Field(
        DEFAULT_MAX_PIXELS, ge=1, description="largest width x height of an image"
    )
    max_full_pixels: int = Field(
        DEFAULT_MAX_FULL_PIXELS,
        ge=1,
        description="largest width x height of an image that cannot be decoded at reduced scale "
        "(PNG, WebP); images with 16-bit samples count twice",
    )
    max_heavy_pixels: int = Field(
        128 * MIB,
        ge=1,
        description="pixels that a Decoder holds at full scale at a time, at most; images up to 2 "
        "Mi pixels do not count; further images get 429",
    )
    max_files: int = Field(64, ge=1, description="files in one multipart request, at most")
    max_concurrent_requests: int = Field(
        128, ge=1, description="requests under way per Gateway, at most; further ones get 429"
    )
    target_wait_ms: float | None = Field(
        50.0,
        ge=0,
        le=10_000,
        description="how long an admitted request may wait for free cores in overload; the "
        "Gateway lowers its limit of requests to keep it, if the members run in its process; "
        "null: max_concurrent_requests is the limit in overload too",
    )
    max_queued_images: int = Field(
        512,
        ge=1,
        description="images that wait for a member's replica, at most; a quarter of the places is "
        "kept for requests with a single image",
    )
    default_top_k: int = Field(
        5, ge=1, description="classes in an answer without top_k; never more than the set has"
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
