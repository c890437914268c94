"""The service of the bundled set has nothing of runtimes that its networks do not need."""

import httpx
import pytest

from tests.support.services.live_service import Service
from tests.support.services.processes import mapped_runtimes


@pytest.mark.slow
@pytest.mark.torch  # where it is installed, and could be mapped
def test_the_bundled_set_maps_no_other_runtime(service: Service, photo: bytes) -> None:
    """In the fast tier: tests/unit/app/test_import_rules.py."""
    assert httpx.post(f"{service.url}/v1/classify", content=photo, timeout=60).status_code == 200
    assert mapped_runtimes(service.process.pid) == set()
