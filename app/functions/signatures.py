"""What the operator's own functions take and return: the settings ``preprocess`` and ``combine``.

A function is called on a thread, by several at a time. It gets read-only arrays and returns a new
one. A function that raises, or returns something else than is said here, fails the request that it
was called for (500, code ``function``), and no other.
"""

from collections.abc import Mapping
from typing import Protocol

from models.ensemble import Probabilities
from models.runtime import Pixels

MAX_VIEWS = 8  # each costs every member another inference


class Preprocess(Protocol):
    """Pixels to pixels, between the Decoder and the members."""

    def __call__(self, images: Pixels, /) -> Pixels:
        """Return what the members are to see of some images.

        Args:
            images: uint8 (N, H, W, 3) at the set's input size, in its colour order (BGR); N is 1
                and more, and varies from call to call. Where members take different inputs, there
                is a call for each distinct one.

        Returns:
            uint8 (V * N, H, W, 3), of the same H and W: V views of each image, 1 to 8, the same
            number in every call. Row ``v * N + i`` is view v of image i, which is the order that
            ``np.concatenate([images, mirrored])`` gives. Each member runs on every view, and the
            plain mean of an image's V rows is what the member says of the image, to the cascade
            and the combiner too.

        """
        ...


class Combine(Protocol):
    """The members' rows to the ensemble's, in place of the weighted average."""

    def __call__(
        self, members: Mapping[str, Probabilities], weights: Mapping[str, float], /
    ) -> Probabilities:
        """Return the ensemble's probabilities of some images.

        Args:
            members: float32 (N, C) probabilities of every member that answered, by its name, in the
                manifest's order. With ``answer_policy`` ``quorum`` or ``any`` some may be missing.
            weights: the manifest's weights of the members that are there, scaled to sum to one.

        Returns:
            float32 (N, C), finite, each value 0 to 1, each row summing to one (within 0.001). Of a
            multi-label set rows are scores of each class by itself and need not sum to one; a
            function that gives a class little which all members score highly is refused when the
            service starts.

        """
        ...
