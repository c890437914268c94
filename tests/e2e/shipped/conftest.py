"""One service with serve_config.yaml as it is, for what most users are to see."""

import signal
from collections.abc import Iterator

import pytest

from tests.support.services.live_service import Service, Start
from tests.support.services.stopping import lent


@pytest.fixture(scope="package")
def service(start_process: Start) -> Iterator[Service]:
    """The running service that the tests share."""
    with lent(start_process(), signal.SIGINT, is_for_all=True) as shared:
        yield shared


@pytest.fixture(scope="package")
def service_url(service: Service) -> str:
    return service.url
