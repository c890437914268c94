"""The signatures of the operator's own functions: the settings ``preprocess`` and ``combine``.

A function is called on several threads at a time. It gets read-only arrays and returns a new one.
If it raises, or its result does not fit, only the request that it was called for fails (500, code
``function``).
"""

from collections.abc import Mapping
from typing import Protocol

from models.ensemble import Probabilities
from models.runtime import Pixels

MAX_VIEWS = 8  # each costs an inference of every member


class Preprocess(Protocol):
    """Maps pixels to pixels, between the Decoder and the members."""

    def __call__(self, images: Pixels, /) -> Pixels:
        """Return the images that the members get.

        Args:
            images: uint8 (N, H, W, 3) at the set's input size, in its colour order (BGR). N is at
                least 1 and varies. If members have different inputs, each distinct input gets a
                call.

        Returns:
            uint8 (V * N, H, W, 3) with the same H and W: V views of each image, 1 to 8, the same
                number in every call. Row ``v * N + i`` is view v of image i, the order of
                ``np.concatenate([images, mirrored])``. Each member runs on every view. The mean of
                an image's V rows is the member's result, for the cascade and the combiner too.

        """


class Combine(Protocol):
    """Maps the members' rows to the ensemble's, in place of the weighted average."""

    def __call__(
        self, members: Mapping[str, Probabilities], weights: Mapping[str, float], /
    ) -> Probabilities:
        """Return the ensemble's probabilities.

        Args:
            members: float32 (N, C) probabilities by member, for the members that answered, in the
                manifest's order. With ``answer_policy`` ``quorum`` or ``any`` some may be missing.
            weights: the manifest's weights of these members, scaled to sum to one.

        Returns:
            float32 (N, C), finite, each value 0 to 1, each row summing to one (within 0.001). In a
                multi-label set values are independent scores, and rows need not sum to one. A
                function that gives a low score to a class that all members score highly is refused
                at the start.

        """
