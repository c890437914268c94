"""Admits callers to shared memory if it is on, and they are known to be on this machine."""

import asyncio
import ipaddress
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from app.environment import REGIONS_FOLDER, environment_value
from app.errors import BadRegionError, BodyTooLargeError, ConfigError, NotLocalError
from app.oip.bodies import InferAnswer, OutputTensor
from app.oip.regions import Regions
from app.oip.tensors import Tensor, shown
from app.queueing.admission import Share

OFF = (
    "shared memory is off here; send the data itself, or start the service with shared_memory: "
    "unproxied"
)
LONG_BYTES = 2**20  # longer reads run on a thread, to keep the event loop free
NO_CUDA = (
    "CUDA shared memory is not supported: the networks run on CPUs; send the data itself, or "
    "register system shared memory"
)


def regions_of(*, is_on: bool) -> Regions | None:
    """Return a Gateway's regions; None if shared memory is off.

    Raises:
        ConfigError: shared memory is on, but callers may be on other machines.

    """
    if not is_on:
        return None
    folder = environment_value(REGIONS_FOLDER)
    if folder is None:
        raise ConfigError(
            "shared_memory is for tandem serve, which knows that it listens on loopback "
            "alone; start the service with it, or leave the setting out"
        )
    return Regions(Path(folder))


def for_caller(regions: Regions | None, *, is_local: bool) -> Regions:
    """Return the regions, for a caller on this machine.

    Raises:
        BadRegionError: shared memory is off.
        NotLocalError: the caller is not known to be on this machine.

    """
    if regions is None:
        raise BadRegionError(OFF)
    if not is_local:
        raise NotLocalError(
            "shared memory is for programs on the service's own machine that call it directly; "
            "send the data itself"
        )
    return regions


def is_loopback(address: str) -> bool:
    """Whether ``address`` is a loopback IP address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def asks_for_itself(header: Callable[[str], str | None]) -> bool:
    """Whether no header says that a request was made for somebody else.

    A proxy may name the client that it forwards for. A web page's requests have an origin, and are
    the page's, wherever the browser runs.

    Args:
        header: returns a header's values, joined by commas; None if it is absent.

    """
    if header("origin") is not None or header("forwarded") is not None:
        return False
    forwarded = header("x-forwarded-for")
    return forwarded is None or all(is_loopback(part.strip()) for part in forwarded.split(","))


async def loaded(tensor: Tensor, regions: Regions | None, max_bytes: int, share: Share) -> Tensor:
    """Return a tensor with its contents, read from its region if it has one.

    The bytes count in ``share`` like a body's, before memory is allocated for them.

    Raises:
        BodyTooLargeError: the tensor is longer than a body may be; nothing was read.
        UnknownRegionError, BadRegionError: the region is not as it was registered.
        OverloadedError: the bodies of all requests together are too large.

    """
    if tensor.region is None or regions is None:
        return tensor
    if tensor.region.byte_size > max_bytes:
        raise BodyTooLargeError(
            f"input {shown(tensor.name)} has {tensor.region.byte_size} bytes of shared memory, the "
            f"limit is {max_bytes}; send fewer images per request"
        )
    share.grow(tensor.region.byte_size)
    if tensor.region.byte_size > LONG_BYTES:
        raw = await asyncio.to_thread(regions.read, tensor.region)
    else:
        raw = regions.read(tensor.region)
    return replace(tensor, raw=raw, region=None)


def placed(answer: InferAnswer, regions: Regions | None) -> InferAnswer:
    """Write the outputs that have a region; return the answer with their places.

    Raises:
        UnknownRegionError, BadRegionError: a region is not as it was registered, or too small.

    """
    if regions is None:
        return answer

    def place(output: OutputTensor) -> OutputTensor:
        if output.region is None:
            return output
        return replace(output, region=regions.write(output.region, output.packed()))

    return replace(answer, outputs=tuple(map(place, answer.outputs)))
