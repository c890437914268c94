"""Whatever parameters name in shared memory: never a 500, and what is refused changes nothing."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.http.api import create_api
from app.oip.inference import Inference
from tests.support.open_inference import IMAGE, Graph, elements, with_header
from tests.support.raw_asgi import Asked, Told, ask
from tests.support.shared_regions import Memory

EXAMPLES = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FILE = elements(IMAGE)
NUMBERS = st.integers(-2, 120) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
ANY = (
    NUMBERS | st.none() | st.booleans() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "shared_memory_region": st.sampled_from(["in", "out", "other", ""]) | ANY,
        "shared_memory_byte_size": st.sampled_from([len(FILE), 40]) | NUMBERS | ANY,
        "shared_memory_offset": st.just(0) | NUMBERS | ANY,
        "classification": st.just(3),
        "binary_data": st.booleans(),
    },
)
OUTPUTS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["probabilities", "label"])}, optional={"parameters": PARAMETERS}
    ),
    max_size=2,
)
REFUSED = {400, 403, 404, 409, 413}
REGISTERED = st.fixed_dictionaries(
    {},
    optional={
        "key": st.sampled_from(["k", "/k", "l", "../k", "..", "link", "k\0"]) | ANY,
        "offset": NUMBERS | ANY,
        "byte_size": NUMBERS | ANY,
    },
)


class Service:
    """The interface of the real service, and its memory, which has two regions."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.memory, graph = Memory(Path(self._folder.name)), Graph()
        (self.memory.folder / "link").symlink_to("k")
        inference = Inference(graph.service, self.memory.regions)
        self.budget = graph.service.byte_budget
        self.api = create_api(graph.service, inference)

    def restored(self) -> "Service":
        """Return it with the regions as they were."""
        self.memory.regions.unregister()
        self.memory.region(FILE, "in", "k")
        self.memory.region(bytes(100), "out", "l")
        return self


@cache
def service() -> Service:
    return Service()


def check(told: Told) -> None:
    assert told.status in REFUSED | {200}, (told.status, told.body)
    if told.status != 200:
        assert list(json.loads(told.body)) == ["error"]


@EXAMPLES
@given(PARAMETERS, OUTPUTS, st.sampled_from([[1], [1, 1], [2], [0]]))
def test_any_parameters_of_tensors(
    source: dict[str, Any], outputs: list[dict[str, Any]], shape: list[int]
) -> None:
    tensor = {"name": "image", "datatype": "BYTES", "shape": shape, "parameters": source}
    body, headers = with_header({"inputs": [tensor], "outputs": outputs})
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    asked, path = service().restored(), "/v2/models/imagenette/infer"
    check(ask(asked.api, Asked("POST", path, headers=sent, chunks=[body])))
    assert [(asked.memory.folder / key).stat().st_size for key in ("k", "l")] == [len(FILE), 100]
    assert asked.budget.num_held == 0


@EXAMPLES
@given(st.sampled_from(["in", "mine", "a%2fb", "%00", "ü"]), REGISTERED | ANY)
def test_anything_that_is_to_be_a_region(name: str, fields: Any) -> None:
    path = f"/v2/systemsharedmemory/region/{name}"
    api = service().restored().api
    check(ask(api, Asked("POST", f"{path}/register", chunks=[json.dumps(fields).encode()])))
    check(ask(api, Asked("GET", f"{path}/status")))
    check(ask(api, Asked("POST", f"{path}/unregister")))
    check(ask(api, Asked("GET", "/v2/systemsharedmemory/status")))
