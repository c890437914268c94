"""A node whose sockets are closed at the end of the test."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.channels import Node


@pytest_asyncio.fixture
async def node() -> AsyncIterator[Node]:
    found = Node()
    yield found
    await found.close()
