"""Graceful shutdown: lets the replicas answer the requests that are under way."""

import contextlib
import time
from typing import Any

ANSWERS_WITHIN_S = 3.0  # a controller that is well
POLL_EVERY_S = 0.1


def drain(client: Any, timeout_s: float) -> bool:
    """Delete the applications while HAProxy is still there to hand the answers on.

    Return whether the controller answered.

    Serve's shutdown ends both at the same time. A controller that got the signal too answers
    nothing: every question here has a time limit of its own. ``serve.status()`` has none, and a
    thread that is still in it when Ray is shut down is a segmentation fault.

    Args:
        client: Serve's; its controller is asked.
        timeout_s: how long the replicas may take, once the controller has answered.

    """
    import ray

    controller = client._controller
    ends = time.monotonic() + timeout_s

    def applications() -> list[str]:
        left_s = max(POLL_EVERY_S, min(ANSWERS_WITHIN_S, ends - time.monotonic()))
        details = ray.get(controller.get_serve_instance_details.remote(), timeout=left_s)
        return list(details["applications"])

    # It may be slow or dead, and so may Ray: then there is nobody to wait for.
    with contextlib.suppress(Exception):
        client.delete_apps(applications(), blocking=False)
        while applications() and time.monotonic() < ends:
            time.sleep(POLL_EVERY_S)
        return True
    return False
