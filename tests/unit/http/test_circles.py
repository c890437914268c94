"""What a request's body held goes when the request is answered, not when the collector comes."""

import gc
from collections.abc import Iterator

import pytest

from app.http.api import create_api
from tests.support.fakes import FakeService
from tests.support.raw_asgi import Asked, ask
from tests.unit.http.test_both_ways import REQUESTS

OURS = ("app", "models", "python_multipart")


@pytest.fixture
def found() -> Iterator[list[object]]:
    """What only the garbage collector would have ended; it is the list of a collection."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("name", REQUESTS)
def test_no_body_waits_for_the_garbage_collector(name: str, found: list[object]) -> None:
    api = create_api(FakeService())  # type: ignore[arg-type]
    asked = REQUESTS[name]
    told = ask(api, Asked(headers=asked.headers, query=asked.query, chunks=asked.chunks))
    assert told.status != 0
    gc.collect()
    ours = [one for one in found if type(one).__module__.partition(".")[0] in OURS]
    assert ours == []
    assert not [one for one in found if isinstance(one, BaseException)]  # whose frames hold more
