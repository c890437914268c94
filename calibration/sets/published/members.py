"""Reads the members that ``tandem models fetch`` is asked for.

``NAME`` or ``NAME=WEIGHTS`` is torchvision's; ``timm:MODEL`` or ``NAME=timm:MODEL`` is timm's, of
which MODEL may name the weights too (``mobilenetv3_small_100.lamb_in1k``). No name of torchvision's
weights has a colon.
"""

from collections.abc import Sequence

from calibration.sets.published.interface import Published
from calibration.sets.published.timm_weights import PREFIX, timm_weights
from calibration.sets.published.torchvision_weights import torchvision_weights
from models.errors import ModelSetError
from models.manifest import MAX_MEMBERS


def read_members(texts: Sequence[str]) -> list[Published]:
    """Return the networks asked for, in their order.

    Raises:
        MissingExtraError: one is timm's, and timm is not installed.
        ModelSetError: no such network or weights, too many, or a name twice.

    """
    found: dict[str, Published] = {}
    for text in texts:
        network = _network(text)
        if network.name in found:
            raise ModelSetError(
                f"--member {network.name} is given twice; a set has a name once. One of timm's "
                "takes another name so: NAME=timm:MODEL"
            )
        found[network.name] = network
    if len(found) > MAX_MEMBERS:
        raise ModelSetError(f"{len(found)} members; a set has 1 to {MAX_MEMBERS}: leave some out")
    return list(found.values())


def _network(text: str) -> Published:
    if text.startswith(PREFIX):
        return timm_weights(text.removeprefix(PREFIX))
    name, _, version = text.partition("=")
    if version.startswith(PREFIX):
        return timm_weights(version.removeprefix(PREFIX), name)
    return torchvision_weights(name, version)
