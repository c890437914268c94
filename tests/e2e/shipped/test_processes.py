"""The processes of a real service: forks, of no lower priority, without runtimes nobody needs.

That one which dies is replaced by another is in test_stopping.py.
"""

import contextlib

import httpx
import psutil
import pytest

from tests.support.services.processes import (
    descendants,
    fork_server,
    mapped_runtimes,
    serve_logs,
    title,
)

FORKED = ("Agent", "ProxyActor", "HAProxyManager", "ServeController", "ServeReplica")


def test_every_process_of_rays_is_a_fork(service):
    processes = descendants(service.process.pid)
    of_ray = [p for p in processes if any(kind in title(p) for kind in FORKED)]
    assert len(of_ray) >= len(FORKED)
    assert {p.parent() for p in of_ray} == {fork_server(service.process.pid)}
    assert "not forked" not in (serve_logs(service.process.pid).parent / "raylet.err").read_text()


def test_no_process_gives_way_to_other_programs(service):
    """Ray's own default is nice 15 for its workers: a busy browser would starve them."""
    own = psutil.Process(service.process.pid).nice()
    levels = set()
    for process in descendants(service.process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while this looked
            levels.add(process.nice())
    assert levels == {own}


@pytest.mark.slow
@pytest.mark.torch  # where it is installed, and could be mapped
def test_the_bundled_set_maps_no_other_runtime(service, photo):
    """In the fast tier: tests/unit/app/test_import_rules.py."""
    assert httpx.post(f"{service.url}/v1/classify", content=photo, timeout=60).status_code == 200
    assert mapped_runtimes(service.process.pid) == set()
