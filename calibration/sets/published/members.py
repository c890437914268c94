"""Parses the members that ``tandem models fetch`` downloads.

``NAME`` or ``NAME=WEIGHTS`` is torchvision's. ``timm:MODEL`` or ``NAME=timm:MODEL`` is timm's;
MODEL may include the weights (``mobilenetv3_small_100.lamb_in1k``). torchvision's weights never
have a colon in their name.
"""

from collections.abc import Sequence

from calibration.sets.published.timm_weights import PREFIX, TimmWeights, timm_weights
from calibration.sets.published.torchvision_weights import TorchvisionWeights, torchvision_weights
from models.errors import ModelSetError
from models.manifest import MAX_MEMBERS

Published = TorchvisionWeights | TimmWeights


def read_members(texts: Sequence[str]) -> list[Published]:
    """Return the networks in the order of ``texts``.

    Raises:
        MissingExtraError: timm is not installed, but a network is timm's.
        ModelSetError: unknown network or weights, too many networks, or a repeated name.

    """
    members: dict[str, Published] = {}
    for text in texts:
        network = _network(text)
        if network.name in members:
            raise ModelSetError(
                f"--member {network.name} is given twice; a set has a name once. One of timm's "
                "takes another name so: NAME=timm:MODEL"
            )
        members[network.name] = network
    if len(members) > MAX_MEMBERS:
        raise ModelSetError(f"{len(members)} members; a set has 1 to {MAX_MEMBERS}: leave some out")
    return list(members.values())


def _network(text: str) -> Published:
    if text.startswith(PREFIX):
        return timm_weights(text.removeprefix(PREFIX))
    name, _, version = text.partition("=")
    if version.startswith(PREFIX):
        return timm_weights(version.removeprefix(PREFIX), name)
    return torchvision_weights(name, version)
