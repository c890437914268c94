"""``tandem evaluate --url``: a server that answers right, wrong, busy, or is not there."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from calibration.datasets import MultiLabelledImage
from calibration.evaluation.inference import AnsweredBatch
from calibration.evaluation.live import LiveService, MultiLabelLiveService, into_shadow
from models.ensemble import average, top_k
from models.errors import ModelSetError
from models.image import read_image
from models.manifest import ENSEMBLE, read_manifest
from models.model_set import ModelSet, load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions
from tests.support.cases import cases
from tests.support.command_line import tandem
from tests.support.http_server import FakeServer
from tests.support.scored_sets import GAINS, PICTURES, average_score, score, write_scored_set
from tests.support.scored_sets import LABELS as SCORED_LABELS
from tests.support.tiny_networks import LABELS, write_pictures, write_tiny_set

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
Answer = Callable[[bytes], dict[str, Any]]
FakeAnswer = Callable[[bytes], tuple[int, bytes]]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("data") / "eval", num_per_color=4)


@pytest.fixture(scope="module")
def right(tiny_set: Path) -> Answer:
    """Answer as the service does, from the same networks."""
    model_set = load_model_set(str(tiny_set))
    names = [member.name for member in model_set.manifest.members]
    networks = {
        n: CompiledNetwork(model_set.network_path(n), RuntimeOptions(batch_sizes=(1,)))
        for n in names
    }

    def listed(row: np.ndarray) -> list[dict[str, Any]]:
        found = top_k(row, LABELS, 3)
        return [{"index": p.index, "label": p.label, "probability": p.probability} for p in found]

    def answer(data: bytes) -> dict[str, Any]:
        image = read_image(data, model_set.manifest.image.rule)[np.newaxis]
        rows = {n: network.predict(image) for n, network in networks.items()}
        ensemble = average(rows, dict.fromkeys(names, 1.0))[0]
        members = {n: {"predictions": listed(r[0])} for n, r in rows.items()}
        return {"predictions": listed(ensemble), "members": members}

    return answer


@pytest.fixture
def server(right: Answer) -> Iterator[FakeServer]:
    with FakeServer() as fake:
        facts = {
            "model_set": "tiny",
            "labels": list(LABELS),
            "members": [{"name": n, "precision": "INT8"} for n in ("sure", "unsure")],
        }
        fake.get = (200, json.dumps(facts).encode())
        fake.answer = lambda body: (200, json.dumps(right(body)).encode())
        yield fake


def evaluated(folder, pictures, url):
    return tandem("evaluate", folder, "--images", pictures, "--url", url, "--json", "-")


@pytest.fixture
def compared(tiny_set, pictures, server):
    """Evaluate with the service's answers, or with others: the exit code and what was said."""

    def compare(answer: FakeAnswer | None = None, images: Path = pictures) -> tuple[int, Any]:
        server.answer = answer or server.answer
        done = evaluated(tiny_set, images, server.url)
        return done.exit_code, json.loads(done.stdout)["live"]

    return compare


@pytest.fixture
def odd(pictures) -> Path:
    return sorted(pictures.glob("*/*"))[5]


def otherwise(right: Answer, odd: Path | None, change: Callable[[Any], object]) -> FakeAnswer:
    """Answer rightly, but for one file or for all, whose answer ``change`` changes."""

    def answer(body: bytes) -> tuple[int, bytes]:
        content = right(body)
        if odd is None or body == odd.read_bytes():
            change(content)
        return 200, json.dumps(content).encode()

    return answer


def test_a_service_that_answers_the_same(tiny_set, compared):
    exit_code, live = compared()
    assert (exit_code, live["num_images"], live["num_same"], live["is_same"]) == (0, 12, 12, True)
    assert live["num_right"] == {"sure": 12, "unsure": 12, "ensemble": 12}
    assert live["num_right_top5"] == 12
    assert read_manifest(tiny_set).accuracy == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_loopback_is_asked_without_a_proxy(tiny_set, pictures, server, proxy, host):
    done = evaluated(tiny_set, pictures, server.url.replace("127.0.0.1", host))
    assert done.exit_code == 0, done.output
    assert proxy.requests == []


def test_one_other_answer_is_found_and_named(compared, right, odd):
    exit_code, live = compared(otherwise(right, odd, lambda said: said["predictions"].reverse()))
    assert (exit_code, live["num_same"]) == (1, 11)
    (line,) = live["differences"]
    assert str(odd) in line
    assert "ensemble: class" in line


def test_the_cascade_of_a_service_is_compared_with_the_first_member_alone(compared, right, odd):
    def answer(body: bytes) -> tuple[int, bytes]:
        found = right(body)
        del found["members"]["unsure"]
        if body != odd.read_bytes():  # of this one the ensemble's answer comes all the same
            found["predictions"] = found["members"]["sure"]["predictions"]
        return 200, json.dumps(found | {"skipped_members": ["unsure"]}).encode()

    _, live = compared(answer)
    assert (live["num_alone"], live["num_same"]) == (12, 11)
    assert str(odd) in live["differences"][0]
    assert live["num_right"] == {"sure": 12, "ensemble": 12}


def test_a_member_that_did_not_answer_is_a_difference(compared, right, odd):
    """A degraded answer is the average of the members that answered."""

    def lose_a_member(content: dict[str, Any]) -> None:
        content["predictions"] = content["members"]["sure"]["predictions"]
        content["missing_members"] = {"unsure": "late"}
        del content["members"]["unsure"]

    exit_code, live = compared(otherwise(right, odd, lose_a_member))
    assert (exit_code, live["num_partial"]) == (1, 1)
    assert live["differences"] == [f"{odd}: unsure did not answer"]
    assert live["num_right"] == {"sure": 12, "unsure": 11, "ensemble": 12}


def test_another_probability_is_found(compared, right):
    def lower(content: dict[str, Any]) -> None:
        content["members"]["sure"]["predictions"][0]["probability"] -= 0.05

    _, live = compared(otherwise(right, None, lower))
    assert (live["num_same"], live["max_difference"]) == (0, pytest.approx(0.05, abs=1e-3))


def test_a_busy_service_is_asked_again(compared, right):
    seen: set[bytes] = set()

    def answer(body: bytes) -> tuple[int, bytes]:
        if body not in seen:
            seen.add(body)
            return 429, b'{"error": {"code": "overloaded"}}'
        return 200, json.dumps(right(body)).encode()

    assert compared(answer)[0] == 0


def test_after_the_last_try_nothing_waits(compared, monkeypatch):
    waits = list[float]()
    monkeypatch.setattr("calibration.evaluation.live.time.sleep", waits.append)
    assert compared(lambda _: (503, b"busy"))[0] == 1
    assert sorted(waits) == sorted([0.2, 0.4, 0.8, 1.6] * 12)


@cases(
    "status, body, says",
    (400, b'{"error": {"code": "not_an_image"}}', "not_an_image"),
    *((200, body, "") for body in (b"", b"[]", b"{}", b'{"predictions": [], "members": {}}')),
)
def test_a_refusal_and_an_answer_of_another_shape_are_differences(compared, status, body, says):
    exit_code, live = compared(lambda _: (status, body))
    assert (exit_code, live["num_same"], len(live["differences"])) == (1, 0, 12)
    assert says in live["differences"][0]


def test_an_unreadable_image_must_be_refused_there_too(tmp_path, compared, right):
    mixed = write_pictures(tmp_path / "mixed", num_per_color=1)
    (mixed / LABELS[0] / "bad.jpg").write_bytes(b"no image")
    another = sorted(mixed.glob("*/*.png"))[0].read_bytes()

    def answer(body: bytes, *, is_strict: bool) -> tuple[int, bytes]:
        if body == b"no image" and is_strict:
            return 400, b"{}"
        return 200, json.dumps(right(another if body == b"no image" else body)).encode()

    assert compared(partial(answer, is_strict=True), mixed)[0] == 0
    exit_code, live = compared(partial(answer, is_strict=False), mixed)
    assert exit_code == 1
    assert "unreadable here, not there" in live["differences"][0]


@cases(
    "changes, says",
    ({"model_set": "other"}, "serves other"),
    ({"labels": ["a", "b", "c"]}, "serves tiny"),
    ({"members": [{"name": "sure", "precision": "INT8"}]}, "serves tiny (sure)"),
    *(
        (
            {stage: "own.module:function"},
            f"{stage}: own.module:function), which this process does not",
        )
        for stage in ("preprocess", "combine")
    ),
)
def test_another_set_or_functions_of_its_own_are_refused(tiny_set, pictures, server, changes, says):
    facts = json.loads(server.get[1]) | {"preprocess": None, "combine": None}
    server.get = (200, json.dumps(facts | changes).encode())
    done = evaluated(tiny_set, pictures, server.url)
    assert isinstance(done.exception, ModelSetError)
    assert says in str(done.exception)
    server.get = (200, json.dumps(facts).encode())
    assert evaluated(tiny_set, pictures, server.url).exit_code == 0


@pytest.mark.parametrize("answer", [(404, b"{}"), (200, b"<html>"), (200, b"[]"), (200, b"{}")])
def test_something_else_on_the_port_is_told(tiny_set, pictures, server, answer):
    server.get = answer
    done = evaluated(tiny_set, pictures, server.url)
    assert "does not answer as Tandem does" in str(done.exception)


def test_nobody_there(tiny_set, pictures, free_port):
    done = evaluated(tiny_set, pictures, f"http://127.0.0.1:{free_port()}")
    assert "(Connection refused); is the service running?" in str(done.exception)


def test_a_set_that_answers_wrongly_is_measured_as_such(pictures, tmp_path, server):
    """The same name and labels, other networks: every image differs."""
    other = write_tiny_set(tmp_path / "tiny", gains={"sure": -8.0, "unsure": -2.0})
    live = json.loads(evaluated(other, pictures, server.url).stdout)["live"]
    assert (live["num_same"], live["num_right"]["ensemble"]) == (0, 12)


@cases("url, says", ("http://[::1", "is no address"), ("127.0.0.1:8000", "write http://127"))
def test_an_address_that_is_none(tiny_set, url, says):
    with pytest.raises(ModelSetError, match=says):
        LiveService(url, load_model_set(str(tiny_set)))


def test_a_new_version_is_put_into_the_shadow_or_the_refusal_is_said(tiny_set, tmp_path):
    model_set = load_model_set(str(tiny_set))
    name = f"tiny@{model_set.fingerprint()}"
    (tmp_path / "key").write_text("a-long-enough-key-of-mine\n")
    with FakeServer() as server:
        server.get = 200, json.dumps({"shares": {"tiny@0123456789ab": 100}, "revision": 3}).encode()
        server.answer = lambda _: (200, b"{}")
        assert into_shadow(server.url, model_set, tmp_path / "key") == name
        path, body = server.requests[-1]
        asked = {"shares": {"tiny@0123456789ab": 100}, "revision": 3, "shadow": name}
        assert (path, json.loads(body)) == ("/v1/traffic", asked)
        assert server.keys == ["Bearer a-long-enough-key-of-mine"] * 2
        error = json.dumps({"error": {"message": "this service has one version"}}).encode()
        server.get = 404, error
        with pytest.raises(ModelSetError, match=r"is made, and .*: this service has one version"):
            into_shadow(server.url, model_set)
        server.get = 200, b"[]"
        with pytest.raises(ModelSetError, match="does not answer as Tandem does"):
            into_shadow(server.url, model_set)
    with pytest.raises(ModelSetError, match="does not answer: "):
        into_shadow(server.url, model_set)
    with pytest.raises(ModelSetError, match=r"--shadow: .*is no address"):
        into_shadow("http://[::1", model_set)


COLOUR = PICTURES["cyan"][0]
EQUAL = {"steep": 1.0, "flat": 1.0}
ROWS = {name: score(COLOUR, gain) for name, gain in GAINS.items()}
ROWS[ENSEMBLE] = average_score(COLOUR, EQUAL)
MODELS = {
    "model_set": "scored",
    "labels": list(SCORED_LABELS),
    "members": [{"name": name, "precision": "INT8"} for name in GAINS],
    "task": "multi_label",
    "threshold": 0.5,
}


def listed(row) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"index": i, "label": "", "probability": float(p)} for i, p in enumerate(row)
    ]
    return [one for one in found if one["probability"] >= 0.5]


def an_answer(**changes: object) -> dict[str, object]:
    members = {name: {"predictions": listed(ROWS[name])} for name in GAINS}
    return {"predictions": listed(ROWS[ENSEMBLE]), "members": members} | changes


@pytest.fixture(scope="module")
def scored_set(tmp_path_factory: pytest.TempPathFactory) -> ModelSet:
    return load_model_set(str(write_scored_set(tmp_path_factory.mktemp("scored"))))


class Service:
    """What the comparison finds of a service that answers as it is told."""

    def __init__(self, model_set: ModelSet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model_set, self.models, self.answer = model_set, dict(MODELS), an_answer()
        self.asked: list[str] = []
        real = httpx.Client

        def client(**options: Any) -> httpx.Client:
            return real(transport=httpx.MockTransport(self._answer), **options)

        monkeypatch.setattr(httpx, "Client", client)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        told = self.models if request.url.path == "/v1/models" else self.answer
        return httpx.Response(200, content=json.dumps(told))

    def compared(self, classes: tuple[int, ...] = (0, 1)):
        image = MultiLabelledImage(Path("cyan.png"), classes)
        rows = {name: row[None] for name, row in ROWS.items()}
        with MultiLabelLiveService("http://service", self.model_set) as service:
            answering: Any = service
            answering.observe(AnsweredBatch([image], [b"cyan"], {"INT8": rows}, []))
            return service.result


@pytest.fixture
def service(scored_set, monkeypatch) -> Service:
    return Service(scored_set, monkeypatch)


def test_the_same_lists_are_the_same_also_where_all_are_wrong(service):
    result = service.compared()
    assert result.is_same, result.differences
    assert result.num_right == {"steep": 1, "flat": 1, ENSEMBLE: 1}
    assert service.asked[-1].endswith("top_k=3")  # all labels that may be listed
    result = service.compared(classes=(0,))
    assert result.is_same
    assert set(result.num_right.values()) == {0}


FIRST, SECOND = listed(ROWS[ENSEMBLE])
MORE = {"index": 2, "label": "", "probability": 0.9}


@cases(
    "changes, says",
    ({"predictions": [FIRST]}, "^cyan.png: ensemble: label 1 is listed in process alone$"),
    ({"predictions": [MORE, FIRST, SECOND]}, "label 2 is listed live alone"),
    ({"predictions": [MORE | {"index": 9}]}, ""),
    ({"predictions": [FIRST | {"probability": 0.7}, SECOND]}, "score 0.7000 of label 0 live"),
    ({"members": {"steep": {"predictions": listed(ROWS["steep"])}}}, "flat did not answer"),
    ({"predictions": [{"index": "x"}]}, "no answer as Tandem gives"),
)
def test_another_list_is_a_difference(service, changes, says):
    service.answer = an_answer(**changes)
    result = service.compared()
    assert not result.is_same
    assert re.search(says, result.differences[0])
    assert len(result.differences) == 1


@cases(
    "changes, says",
    ({"threshold": 0.4}, r"with a threshold of 0\.4, here it is 0\.5"),
    ({"task": "classification"}, "serves scored as classification, here it is multi_label"),
)
def test_a_service_of_another_task_or_threshold(service, changes, says):
    service.models |= changes
    with pytest.raises(ModelSetError, match=says):
        service.compared()
