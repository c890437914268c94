"""A blocking client of a scripted service."""

import ssl

import pytest

from tandem_client import Client
from tests.support.scripted_service import ScriptedService, SleepingClock


@pytest.fixture
def make():
    """Make a client of a scripted service, on a clock that its waits move."""
    made = []

    def make(*steps, **options):
        service, clock = ScriptedService(*steps), SleepingClock()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without roots, which take time to load
        client = Client("http://tandem/", transport=service.transport, tls=tls, **options)
        client._calls._now = clock
        client._calls._sleep = clock.sleep_async  # type: ignore[assignment]
        made.append(client)
        return client, service, clock

    yield make
    for client in made:
        client.close()
