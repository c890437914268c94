"""Reads images and metadata of a gRPC request, with the same limits as over HTTP."""

import re
from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from app.errors import BadParameterError, BodyTooLargeError, TooManyFilesError
from app.graph.parameters import TIMEOUT_HEADER, parse_timeout_s
from app.grpc import tandem_pb2 as messages
from app.queueing.haproxy_headers import DEADLINE_METADATA, PREFIX_METADATA

M = TypeVar("M", bound=ProtobufMessage)
DEADLINE_FORM = re.compile(r"(\d{1,8})([HMSmun])")
PREFIX_FORM = re.compile(r"00([0-9A-Fa-f]{8})")
UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# The client's clock started when it sent the request, and the answer has to travel.
SHARE_OF_DEADLINE = 0.9


def announced_bytes(metadata: Mapping[str, str]) -> int | None:
    """Return the length of the message that is still to come.

    None if the length is unknown, or if the message is compressed and may become any length.
    """
    prefix = PREFIX_FORM.fullmatch(metadata.get(PREFIX_METADATA, ""))
    return int(prefix[1], 16) if prefix else None


def parsed(message: bytes, kind: type[M]) -> M:
    """Parse a message of a ``kind``; raise :class:`BadParameterError` if it does not parse."""
    request: M = kind()
    try:
        request.ParseFromString(message)
    except DecodeError as error:
        raise BadParameterError(
            f"these {len(message)} bytes are no {kind.DESCRIPTOR.full_name}; make the client from "
            f"{kind.DESCRIPTOR.file.name}"
        ) from error
    return request


def images_of(
    request: messages.ClassifyRequest, max_files: int, max_body_bytes: int
) -> list[bytes]:
    """Return the images' bytes, in order.

    Raises:
        TandemError: there are no images, too many of them, or too many bytes.

    """
    if not request.images:
        raise BadParameterError("the request has no image; put its bytes into images")
    if len(request.images) > max_files:
        raise TooManyFilesError(
            f"the request has {len(request.images)} images, the limit is {max_files}; "
            "send them in several requests"
        )
    images = [bytes(image) for image in request.images]
    size = sum(map(len, images))
    if size > max_body_bytes:
        raise BodyTooLargeError(
            f"the images have {size} bytes, the limit is {max_body_bytes}; "
            "send smaller ones (1,000 pixels a side are plenty) or fewer per request"
        )
    return images


def timeout_s_of(metadata: Mapping[str, str]) -> float | None:
    """Return the client's time limit in s, or None.

    Raises:
        BadParameterError: the value is not a number above 0.

    """
    seconds = []
    if (header := metadata.get(TIMEOUT_HEADER)) is not None:
        seconds.append(parse_timeout_s(header))
    if deadline := DEADLINE_FORM.fullmatch(metadata.get(DEADLINE_METADATA, "")):
        seconds.append(SHARE_OF_DEADLINE * int(deadline[1]) * UNIT_S[deadline[2]])
    return min(seconds, default=None)
