"""What a request's body held goes when the request is answered, not when the collector comes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.http.api import create_api
from tests.support.fakes import FakeService
from tests.support.raw_asgi import REQUESTS, ask

OF_REQUESTS = ("app.http", "app.graph", "python_multipart")


@contextmanager
def left_to_collector() -> Iterator[list[object]]:
    """Give the list of what only the garbage collector would end; it is filled at the end."""
    found: list[object] = []
    gc.collect()
    gc.freeze()  # what the process has by now need not be looked through
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.slow  # make test sends bodies of each kind in tests/unit/http
@pytest.mark.parametrize("name", REQUESTS)
def test_no_body_waits_for_the_garbage_collector(name: str) -> None:
    api, asked = create_api(FakeService()), REQUESTS[name]

    first = ask(api, asked)  # what it alone makes may take the place of other tests' objects
    with left_to_collector() as found:
        second = ask(api, asked)
    assert second.status == first.status != 0
    kept = [one for one in found if type(one).__module__.startswith(OF_REQUESTS)]
    assert kept == []
    assert not [one for one in found if isinstance(one, BaseException)]  # whose frames hold more
