"""Reads images and metadata of a gRPC request, with the same limits as over HTTP."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from google.protobuf.descriptor import Descriptor
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
MAX_FIELDS = 2**16
# Types of values in protobuf's encoding, and the bytes of those that have a fixed number.
VARINT, OF_A_LENGTH, SIZES = 0, 2, {1: 8, 5: 4}
LONGEST_SHIFT = 63  # a number has ten bytes at most


def announced_bytes(metadata: Mapping[str, str]) -> int | None:
    """Return the length of the message that is still to come.

    None if the length is unknown, or if the message is compressed and may become any length.
    """
    prefix = PREFIX_FORM.fullmatch(metadata.get(PREFIX_METADATA, ""))
    return int(prefix[1], 16) if prefix else None


def parsed(message: bytes, kind: type[M]) -> M:
    """Parse a message of a ``kind``.

    Raises:
        BadParameterError: it does not parse, or has over ``MAX_FIELDS`` fields.

    """
    with suppress(IndexError):  # it is cut, and does not parse
        FieldCounter(message).count(0, len(message), kind.DESCRIPTOR)
    request: M = kind()
    try:
        request.ParseFromString(message)
    except DecodeError as error:
        raise BadParameterError(
            f"these {len(message)} bytes are no {kind.DESCRIPTOR.full_name}; make the client from "
            f"{kind.DESCRIPTOR.file.name}"
        ) from error
    return request


class FieldCounter:
    """Counts a message's fields, of messages in it too, without parsing it.

    An empty field has two bytes, and takes up to 90 once it is parsed: 20 MiB would take 900.
    """

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._num_left = MAX_FIELDS

    def count(self, at: int, end: int, kind: Descriptor) -> None:
        """Count the fields from ``at`` to ``end``, which are those of a message of a ``kind``.

        Raises:
            BadParameterError: there are too many.
            IndexError: the message is cut.

        """
        while at < end:
            if self._num_left == 0:
                raise BadParameterError(
                    f"the message has over {MAX_FIELDS} fields, which is the limit; send tensors "
                    "in raw_input_contents, or fewer images"
                )
            self._num_left -= 1
            tag, at = self._number(at)
            size = SIZES.get(tag & 7, 0)
            if tag & 7 == VARINT:
                _, at = self._number(at)
            elif tag & 7 == OF_A_LENGTH:
                size, at = self._number(at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    self.count(at, min(at + size, end), field.message_type)
            at += size

    def _number(self, at: int) -> tuple[int, int]:
        """Return the number at ``at``, in protobuf's form, and where the next value begins."""
        number = shift = 0
        while True:
            byte = self._message[at]
            number |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80 or shift > LONGEST_SHIFT:
                return number, at


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
    """Return the client's time limit in s, or None; raise if it is not a number above 0."""
    seconds = []
    if (header := metadata.get(TIMEOUT_HEADER)) is not None:
        seconds.append(parse_timeout_s(header))
    if deadline := DEADLINE_FORM.fullmatch(metadata.get(DEADLINE_METADATA, "")):
        seconds.append(SHARE_OF_DEADLINE * int(deadline[1]) * UNIT_S[deadline[2]])
    return min(seconds, default=None)
