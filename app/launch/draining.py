"""Graceful shutdown: lets the replicas answer the requests that are under way."""

import contextlib
import time

from app.launch.ray_internals import ServeClient

ANSWERS_WITHIN_S = 3.0  # a controller that is well
POLL_EVERY_S = 0.1


def drain(client: ServeClient, timeout_s: float) -> bool:
    """Delete the applications while HAProxy is still there to hand the answers on.

    Return whether the controller answered.

    Serve's shutdown ends both at the same time. A controller that got the signal too answers
    nothing: every question here has a time limit of its own. ``serve.status()`` has none, and a
    thread that is still in it when Ray is shut down is a segmentation fault.

    Args:
        client: its controller is asked.
        timeout_s: how long the replicas may take, once the controller has answered.

    """
    ends = time.monotonic() + timeout_s

    def applications() -> list[str]:
        left_s = max(POLL_EVERY_S, min(ANSWERS_WITHIN_S, ends - time.monotonic()))
        return list(client.details(left_s)["applications"])

    # It may be slow or dead, and so may Ray: then there is nobody to wait for.
    with contextlib.suppress(Exception):
        client.delete(applications())
        while applications() and time.monotonic() < ends:
            time.sleep(POLL_EVERY_S)
        return True
    return False
