"""Stops a service and checks that it ended in order and left nothing behind."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.services import processes
from tests.support.services.live_service import Service

STOPPED_WITHIN_S = 30


@contextmanager
def leaving_nothing(service: Service, *, busy_s: float = 0) -> Iterator[None]:
    """Check that a service which is told to stop in this block is gone, with all that it had.

    That is every process it started, every port it listened on and the folder of this run.

    Args:
        service: runs, or is starting.
        busy_s: allowed if it is more than ``STOPPED_WITHIN_S``: the machine may be so busy.

    """
    family, folder = (
        processes.descendants(service.process.pid),
        processes.run_folder(service.process.pid),
    )
    ports = processes.listening(family) | {service.port}
    assert folder.is_dir()
    yield
    code = service.process.wait(max(STOPPED_WITHIN_S, busy_s, service.ready_after_s))
    said = service.log.read_text()
    assert code == 0, said
    assert processes.still_running(family) == []
    assert processes.still_listening(ports, folder) == set()
    assert not folder.exists()
    assert "Traceback" not in said
    assert "nothing of it is left running" in said
    assert "raylet" not in said, "Ray's own words on the way down are no user's business"


def stop_and_check(service, number, *, is_for_all=False, busy_s=0):
    """Stop a service by a signal to it alone, or to all that it started."""
    with leaving_nothing(service, busy_s=busy_s):
        service.send(number, is_for_all=is_for_all)


@contextmanager
def lent(service: Service, number: signal.Signals, *, is_for_all: bool) -> Iterator[Service]:
    """Give a service that is ready; afterwards stop it by ``number`` and check what is left.

    So every fixture that shares a service also tests one of the ways to stop it.
    """
    try:
        service.wait_ready()
        yield service
        assert len(processes.descendants(service.process.pid)) > 8
        stop_and_check(service, number, is_for_all=is_for_all)
    finally:
        service.stop()  # if that went wrong
