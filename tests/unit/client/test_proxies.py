"""Which addresses are asked through the environment's proxy: others than this machine's own."""

import asyncio

import pytest

from tandem_client import AsyncClient, Client
from tandem_client.exchange import is_loopback
from tests.support.http_server import FakeServer

OWN = (
    "http://127.0.0.1:8000",
    "https://127.9.9.9",
    "http://127.1:8000",
    "http://2130706433",
    "http://localhost:8000/",
    "http://LOCALHOST",
    "http://tandem.localhost",
    "http://me:secret@[::1]:8000",
    "http://[::ffff:127.0.0.1]:80",
    "http://0.0.0.0:8000",
    "127.0.0.1:9000",
    "localhost:9000",
)
OTHERS = (
    "http://10.0.0.1:8000",
    "http://localhost.example.com",
    "http://127.0.0.1.example.com",
    "http://127.0.0.1@example.com",
    "http://[::2]",
    "tandem:9000",
    "dns:///tandem:9000",
    "http://[",
    "",
)


@pytest.mark.parametrize("address", [*OWN, *OTHERS])
def test_what_is_this_machine(address: str) -> None:
    assert is_loopback(address) is (address in OWN)


def ask(url: str, how: str) -> None:
    async def on_loop() -> None:
        async with AsyncClient(url, api_key="k" * 32) as client:
            await client.classify(b"photo")

    if how == "async":
        asyncio.run(on_loop())
        return
    with Client(url, api_key="k" * 32) as client:
        assert (
            [r.get() for r in client.classify_many([b"photo"])]
            if how == "many"
            else (client.classify(b"photo"))
        )


@pytest.mark.parametrize("how", ["blocking", "async", "many"])
def test_loopback_is_asked_without_a_proxy_and_others_with_it(
    server: FakeServer, proxy: FakeServer, how: str
) -> None:
    ask(server.url, how)
    assert (len(server.requests), proxy.requests) == (1, [])
    ask("http://tandem.invalid", how)
    assert len(server.requests) == 1
    assert proxy.requests == [("http://tandem.invalid/v1/classify", b"photo")]
