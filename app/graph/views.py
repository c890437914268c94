"""A member that is asked for several views of each image, and answers their mean.

The views are what the operator's ``preprocess`` makes, such as the image and its mirror image.
"""

from collections.abc import Mapping

import numpy as np

from app.graph.stages import MemberStage
from app.messages import MemberAnswer
from app.queueing.priority import Lane
from models.runtime import Pixels


class ViewedMember:
    """Stands for a member: takes uint8 (K, V, H, W, 3), asks it for K * V images."""

    def __init__(self, member: MemberStage) -> None:
        self._member = member

    async def classify(self, images: Pixels, left_s: float, lane: Lane) -> MemberAnswer:
        """Return one row per image, the mean of its views' rows."""
        num_images, num_views = images.shape[:2]
        flat = images.reshape(num_images * num_views, *images.shape[2:])
        return folded(await self._member.classify(flat, left_s, lane), num_views)


def viewed(members: Mapping[str, MemberStage], num_views: int) -> Mapping[str, MemberStage]:
    """Return the members as they are asked for so many views; themselves if it is one."""
    if num_views == 1:
        return members
    return {name: ViewedMember(member) for name, member in members.items()}


def folded(answer: MemberAnswer, num_views: int) -> MemberAnswer:
    """Return the answer for K images from that for their K * V views, an image's side by side.

    An image's times are those of the view that was done last.
    """
    rows = answer.probabilities
    mean = rows.reshape(-1, num_views, rows.shape[1]).mean(axis=1, dtype=np.float32)  # (K, C)
    done_ms = np.add(answer.queue_ms, answer.infer_ms).reshape(-1, num_views)
    firsts = np.arange(len(done_ms)) * num_views
    last = (firsts + done_ms.argmax(axis=1)).tolist()
    return MemberAnswer(
        mean,
        tuple(answer.queue_ms[i] for i in last),
        tuple(answer.infer_ms[i] for i in last),
        tuple(answer.batch_size[i] for i in last),
        answer.model_set_fingerprint,
    )
