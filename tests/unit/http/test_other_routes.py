"""Feedback, and the web page with the description of the interface."""

import asyncio
import json
import re
from functools import reduce
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import jsonschema
import pytest
from starlette.types import Message

from app.answers import Classified, Results
from app.errors import MAX_SHOWN
from app.graph.served_models import ServedModels
from app.http import other_routes
from app.http.api import create_api
from app.http.errors import ERRORS
from app.http.other_routes import MAX_AT_ONCE, PART_BYTES, BoundedResponse, _page
from app.samples import feedback as gateways
from app.samples.feedback import Feedback, FeedbackBook, TaughtFolder
from app.samples.samples import Erased, Erasures, SampleBook, SampleEraser, SharedSamples, digest
from app.serve.replica import Hub
from app.settings import Settings
from app.telemetry.metric_table import FEEDBACK
from models.image import ImageInputs, ImageRule
from models.model_set import class_named
from tandem_client import AsyncClient, BadRequest
from tests.support.answers import answer_of
from tests.support.asgi_client import asgi_client
from tests.support.cases import cases
from tests.support.fakes import FakeHandle, FakeService
from tests.support.services.live_service import drawn_photo

ASKED = {"request_id": "1", "label": "x"}
PATHS = ["/", "/docs", "/openapi.json", "/page/page.js", "/docs/assets/swagger-ui-bundle.js"]


class Labelled(FakeService):
    """A service whose one set has two labels."""

    def labels_named(self, name: str | int) -> dict[str, str]:
        n = class_named(name, ("x", "y"))
        return {} if n is None else {"fake": "xy"[n]}


@pytest.fixture
async def feedback(monkeypatch: pytest.MonkeyPatch) -> Feedback:
    """One that remembers an answer to request 1."""
    monkeypatch.setattr("app.serve.replica.start_replica", lambda _: None)
    monkeypatch.setattr(gateways, "SEND_EVERY_S", 0.01)
    feedback = Feedback(FakeHandle(Hub(Settings(), FeedbackBook(50_000))))
    feedback.note("1", [b""], [answer_of()])
    return feedback


@pytest.fixture
async def reporter(feedback):
    async with asgi_client(create_api(Labelled(), feedback=feedback)) as client:
        yield client


async def test_a_label_is_counted_once(reporter, feedback, told):
    feedback.note("2", [b""], [answer_of()])
    version = {"model_set": "fake", "model_version": "0123456789ab"}
    asked = {"request_id": "1", "label": "x"}
    for _ in range(2):
        answer = await reporter.post("/v1/feedback", json=asked)
        assert answer.status_code == 200
        assert answer.json() == asked | {"answered": ["x"], "right": True} | version
    by_number = await reporter.post(
        "/v1/feedback", json={"request_id": "2", "label": 1, "image": 0}
    )
    assert (by_number.json()["label"], by_number.json()["right"]) == ("y", False)
    assert told.of(FEEDBACK) == {
        ("yes", "0123456789ab", "full"): 1.0,
        ("no", "0123456789ab", "full"): 1.0,
    }
    figures = (await reporter.get("/v1/feedback")).json()
    accuracy = {
        "plan": "full",
        "feedback": 2,
        "right": 1,
        "accuracy": 0.5,
        "interval": [0.0945, 0.9055],
    }
    assert figures["versions"] == [version | accuracy]
    assert (figures["remembered_answers"], figures["max_answers"]) == (2, 50_000)


@cases(
    "body, status, message",
    (ASKED | {"request_id": "9"}, 404, "no request '9' is remembered"),
    (ASKED | {"label": "z"}, 422, "'z' is no label of fake"),
    ({"request_id": "1"}, 422, "label: Field required; send {"),
    (ASKED | {"label": 3}, 422, "'3' is no label of fake"),
    (ASKED | {"label": 1.5}, 422, "label: Input should be a valid"),
    (ASKED | {"label": True}, 422, "label: Input should be a valid"),
    (ASKED | {"image": "0"}, 422, "image: Input should be a valid"),
    (ASKED | {"image": 4}, 422, "image is 4, and this request has 1"),
    (ASKED | {"labels": []}, 422, "labels: Extra inputs"),
    (ASKED | {"k" * 99: 0}, 422, f"{'k' * MAX_SHOWN}: Extra inputs"),
    ([], 422, "the body is no object; send"),
)
async def test_what_is_refused(reporter, body, status, message):
    answer = await reporter.post("/v1/feedback", json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


async def test_another_label_is_a_conflict(reporter):
    assert (await reporter.post("/v1/feedback", json=ASKED)).status_code == 200
    second = await reporter.post("/v1/feedback", json=ASKED | {"label": "y"})
    assert (second.status_code, second.json()["error"]["code"]) == (409, "feedback_exists")


@pytest.mark.parametrize("verb", ["GET", "POST"])
async def test_without_feedback_or_a_key(verb, client, feedback, monkeypatch):
    answer = await client.request(verb, "/v1/feedback", json={})
    assert answer.status_code == 404
    assert "start it with feedback: true" in answer.json()["error"]["message"]
    monkeypatch.setenv("TANDEM_API_KEYS", "a-long-enough-key-of-mine")
    async with asgi_client(create_api(Labelled(), feedback=feedback)) as guarded:
        assert (await guarded.request(verb, "/v1/feedback", json={})).status_code == 401


@pytest.fixture
async def teacher(tmp_path, monkeypatch):
    """A client of a service that is taught, whose folder holds two photographs."""
    monkeypatch.setattr("app.serve.replica.start_replica", lambda _: None)
    service = Labelled(Settings(max_body_bytes=10_000))
    service.model_set.manifest.inputs = ImageInputs({"m": ImageRule(8, 8)})
    taught = TaughtFolder(tmp_path / "taught", 10_000, 2)
    async with asgi_client(create_api(service, taught=taught)) as client:
        yield client


@cases(
    "query, status, label",
    ("label=x", 200, "x"),
    ("label=1", 200, "y"),
    ("label=None&model_set=fake", 200, "none"),
    ("label=z", 422, "label is 'z', no class of fake"),
    ("", 422, "label"),
    ("label=x&model_set=other", 404, "no model set 'other'"),
)
async def test_a_photograph_is_taught(teacher, query, status, label):
    answer = await teacher.post(f"/v1/teach?{query}", content=drawn_photo(3, 32, 24))
    assert answer.status_code == status, answer.text
    if status != 200:
        assert label in answer.json()["error"]["message"]
        assert (await teacher.get("/v1/teach")).json()["photographs"] == 0
        return
    assert answer.json() == {"id": answer.json()["id"], "label": label, "model_set": "fake"}
    assert (await teacher.get("/v1/teach")).json()["labels"] == {label: 1}


async def test_what_is_no_photograph_or_too_much_is_not_kept(teacher, client):
    photos = [drawn_photo(seed, 32, 24) for seed in range(3)]
    for content, status in ((b"text", 400), (photos[0][:200], 400), (b"x" * 10_001, 413)):
        assert (await teacher.post("/v1/teach?label=x", content=content)).status_code == status
    kept = [await teacher.post("/v1/teach?label=x", content=photo) for photo in photos]
    assert [answer.status_code for answer in kept] == [200, 200, 409]
    assert kept[2].json()["error"]["code"] == "taught_full"
    again = await teacher.post("/v1/teach?label=y", content=photos[0])
    assert (again.status_code, again.json()["before"]) == (200, "x")
    for verb in ("GET", "POST"):
        off = await client.request(verb, "/v1/teach?label=x", content=photos[0])
        assert off.status_code == 404
        assert "start it with teach: true and teach_dir" in off.json()["error"]["message"]


async def test_what_is_kept_is_erased_by_id(teacher, client, tmp_path):
    photo = (await teacher.post("/v1/teach?label=x", content=drawn_photo(3, 32, 24))).json()
    settings = Settings(teach=True, teach_dir=str(tmp_path / "taught"))
    samples = SharedSamples(
        FakeHandle(Hub(settings, SampleBook(Erasures()))), SampleEraser(settings, 64, Erased())
    )
    async with asgi_client(create_api(Labelled(), samples=samples)) as eraser:
        answer = await eraser.delete(f"/v1/samples/{photo['id']}")
        assert answer.json() == {
            "id": photo["id"],
            "erased": 1,
            "num_gateways": 1,
            "num_current": 1,
        }
        assert (await eraser.delete(f"/v1/samples/{'a' * 201}")).status_code == 422
    assert list((tmp_path / "taught").iterdir()) == []
    off = await client.delete("/v1/samples/1")
    assert (off.status_code, "neither sample_dir nor teach" in off.text) == (404, True)


async def test_feedback_labels_samples_where_the_service_is_taught(feedback, tmp_path):
    taught = TaughtFolder(tmp_path, 10_000, 2)
    api = create_api(Labelled(), feedback=feedback, taught=taught)
    async with asgi_client(api) as client:
        for _ in range(2):
            assert (await client.post("/v1/feedback", json=ASKED)).status_code == 200
    (path,) = tmp_path.iterdir()
    said = json.loads(path.read_text())
    assert (path.stem, said["label"]) == (f"request-{digest('1', 0).hex()}", "x")


async def test_the_client_teaches_reports_and_erases(feedback, tmp_path):
    service = Labelled(Settings(teach=True, teach_dir=str(tmp_path)))
    service.model_set.manifest.inputs = ImageInputs({"m": ImageRule(8, 8)})
    samples = SharedSamples(
        FakeHandle(Hub(service.settings, SampleBook(Erasures()))),
        SampleEraser(service.settings, 64, Erased()),
    )
    taught = TaughtFolder(tmp_path, 10_000, 2)
    api = create_api(service, feedback=feedback, taught=taught, samples=samples)
    transport: Any = httpx.ASGITransport(api)
    async with AsyncClient("http://tandem", transport=transport) as client:
        kept = await client.teach(drawn_photo(3, 32, 24), 1, model_set="fake")
        assert (kept.label, (await client.taught()).labels) == ("y", {"y": 1})
        said = await client.report("1", "x", image=0)
        assert (said.answered, said.right, said.model_set) == (["x"], True, "fake")
        erased = await client.erase_samples(kept.id)
        assert (erased.id, erased.erased, erased.num_gateways) == (kept.id, 1, 1)
        with pytest.raises(BadRequest) as caught:
            await client.report("2", "x")
    assert (caught.value.code, caught.value.status) == ("unknown_request", 404)


async def test_the_page_and_its_protection(client):
    answer = await client.get("/")
    assert answer.status_code == 200
    assert "<title>Tandem" in answer.text
    headers = ("x-content-type-options", "referrer-policy", "cache-control")
    assert [answer.headers[name] for name in headers] == ["nosniff", "no-referrer", "no-cache"]
    style = (await client.get("/page/page.css")).text
    (rule,) = re.findall(r"^\.percent \{(.*)\}$", style, re.MULTILINE)
    assert "white-space: nowrap" in rule  # no percentage is broken inside its number


async def test_who_takes_no_html_gets_a_status_in_place_of_the_page(client):
    """KServe's V1 client, which is httpx, and HAProxy's default check."""
    for accepted in ("*/*", "application/json"):
        answer = await client.get("/", headers={"accept": accepted})
        assert (answer.status_code, answer.json()) == (200, {"status": "alive"})
        assert answer.headers["vary"] == "Accept, User-Agent"
    for headers in ({"accept": "*/*", "user-agent": "curl/8"}, {"accept": ""}):
        assert "<title>Tandem" in (await client.get("/", headers=headers)).text
    checked = await client.options("/")
    assert (checked.status_code, checked.headers["allow"]) == (204, "GET, HEAD, OPTIONS")


async def test_the_chooser_offers_what_is_decoded(monkeypatch):
    usual, page = 'accept="image/jpeg,image/png,image/webp', _page.__wrapped__
    text = page("index.html").data.decode()
    assert f'{usual},image/heic,image/heif,image/avif"' in text
    assert ">JPEG, PNG, WebP, HEIC or AVIF; several" in text
    monkeypatch.setattr("app.http.other_routes.SUFFIXES", (".jpg",))  # as without the extra
    text = page("index.html").data.decode()
    assert f'{usual}"' in text
    assert ">JPEG, PNG or WebP; several" in text


@pytest.mark.parametrize("path", PATHS)
async def test_what_a_client_has_already_is_not_sent_again(client, path):
    whole = await client.get(path)
    etag = whole.headers["etag"]
    for known in (etag, f"W/{etag}", f'"another", {etag}', "*"):
        answer = await client.get(path, headers={"if-none-match": known})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == etag
        assert answer.headers["cache-control"] == "no-cache"
    assert (await client.get(path, headers={"if-none-match": '"another"'})).content == whole.content


async def test_pages_are_read_and_rendered_once(client, monkeypatch):
    first = [(await client.get(path)).content for path in PATHS]
    for name in ("open", "read_bytes", "read_text"):
        monkeypatch.setattr(Path, name, None)
    monkeypatch.setattr("app.http.other_routes.json", None)
    assert [(await client.get(path)).content for path in PATHS] == first


@pytest.mark.parametrize("path", PATHS)
async def test_so_many_are_sent_at_a_time(service, path):
    """Clients that read nothing keep others from pages, and from nothing else."""
    api = create_api(service)
    started, is_over = 0, asyncio.Event()

    async def stalled(_: object) -> None:
        nonlocal started
        started += 1
        await is_over.wait()

    async def receive() -> dict[str, str]:
        raise AssertionError("there is nothing to be read")

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
    async with asyncio.TaskGroup() as group:
        for _ in range(MAX_AT_ONCE):
            group.create_task(api({**scope}, receive, stalled))
        while started < MAX_AT_ONCE:
            await asyncio.sleep(0)
        async with asgi_client(api) as client:
            answer = await client.get(path)
            assert answer.status_code == 429
            assert f"{MAX_AT_ONCE} pages" in answer.json()["error"]["message"]
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.post("/v1/classify", content=b"image")).status_code == 200
            is_over.set()
            while BoundedResponse.num_sending:
                await asyncio.sleep(0)
            assert (await client.get(path)).status_code == 200


async def test_a_client_that_stops_reading_gives_its_place_back(service, monkeypatch):
    """A server holds no more of the answer than some parts."""
    monkeypatch.setattr(other_routes, "SENT_WITHIN_S", 0.05)
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("there is nothing to be read")

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 4:
            await asyncio.Event().wait()

    path = "/docs/assets/swagger-ui-bundle.js"
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
    await create_api(service)(scope, receive, send)
    assert BoundedResponse.num_sending == 0
    assert [len(message.get("body", b"")) for message in sent] == [0, *3 * [PART_BYTES]]
    assert all(message["more_body"] for message in sent[1:])


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_nothing_is_loaded_from_elsewhere_and_only_its_own_script_runs(client, path):
    answer = await client.get(path)
    assert re.findall(r'(?:src|href|url)\s*[=:]\s*["\']?(https?:)?//[^"\']*', answer.text) == []
    policy = answer.headers["content-security-policy"]
    assert re.search(r"default-src 'none'; script-src 'self' 'sha256-[^']{44}';", policy)
    assert "unsafe" not in policy


async def test_the_documentation_works_without_a_network(client):
    page = (await client.get("/docs")).text
    assert '"validatorUrl": null' in page
    assert re.findall("https?://", page) == []


async def test_the_description_lists_every_error_and_its_references_lead_somewhere(client):
    operation = (await openapi(client))["paths"]["/v1/classify"]["post"]
    for status in map(str, ERRORS):
        schema = operation["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}
    assert "multipart/form-data" in operation["requestBody"]["content"]
    description = await openapi(client)
    references = set(re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(description)))
    assert references
    for reference in references:
        reduce(lambda place, part: place[part], reference.split("/"), description)


async def test_the_description_speaks_one_version_of_openapi(client):
    """JSON Schema 2020-12 is not known to 3.0, nor to the bundled Swagger UI."""
    description = await openapi(client)
    assert description["openapi"].startswith("3.0.")
    words = (".const", ".prefixItems", ".contentMediaType", ".$defs", ".examples")
    assert [
        key
        for key, value in walk(description)
        if key.endswith(words) or (key.endswith(".type") and not isinstance(value, str | dict))
    ] == []
    assert "null" not in [value for key, value in walk(description) if key.endswith(".type")]


@pytest.mark.parametrize("name", ["Classified.skipped_members", "ServedModels.fast_plan"])
async def test_the_fast_plan_is_described(client, name):
    model, field = name.split(".")
    schema = (await openapi(client))["components"]["schemas"][model]
    assert schema["properties"][field]["description"]
    assert field not in schema["required"]


@pytest.mark.parametrize("skipped", [None, ["b"]])
async def test_answers_are_what_the_description_says(client, service, skipped):
    service.skipped = skipped
    description = await openapi(client)

    def check(answer: object, name: str) -> None:
        jsonschema.validate(answer, {"$ref": f"#/components/schemas/{name}", **description})

    check((await client.post("/v1/classify", content=b"image")).json(), Classified.__name__)
    form = await client.post("/v1/classify", files=[("f", ("a", b"image")), ("f", ("b", b"no"))])
    check(form.json(), Results.__name__)
    served = (await client.get("/v1/models")).json()
    check(served, "ServedModels")
    assert "fast_plan" not in served  # none is set
    check((await client.get("/nothing")).json(), "ErrorAnswer")


def walk(node: object, place: str = ""):
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{place}.{key}", value
            yield from walk(value, f"{place}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from walk(value, f"{place}[{index}]")


async def openapi(client) -> dict:
    return (await client.get("/openapi.json")).json()


@pytest.mark.parametrize("prefix", ["", "/tandem"])
async def test_below_a_route_prefix_everything_that_the_pages_name_is_there(service, prefix):
    """Serve hands the prefix on as root_path; a proxy's nobody knows: addresses are relative."""
    async with asgi_client(create_api(service), root_path=prefix) as client:
        for page in (f"{prefix}/", f"{prefix}/docs"):
            answer = await client.get(page)
            assert answer.status_code == 200
            names = re.findall(r'(?:src|href|fetch)[=(]["\']([^"\'#]*)', answer.text)
            assert len(names) >= 4
            assert [name for name in names if name.startswith("/") or ":" in name] == []
            for name in names:
                answer = await client.get(urljoin(page, name))
                assert answer.status_code == 200, name
                if name.startswith("page"):
                    assert answer.headers["cache-control"] == "no-cache"
        files = ("page.js", "draw.js", "send.js")
        scripts = [(await client.get(f"{prefix}/page/{name}")).text for name in files]
    assert re.findall(r'["\'`]/(?:page|docs)', "".join(scripts)) == []
    assert "`..${path}`, import.meta.url" in scripts[-1]


class Advising(FakeService):
    """A service whose set has advice for its operator."""

    def served_models(self) -> ServedModels:
        served = super().served_models()
        served.hint = "tandem models fetch imagenet"
        return served


@cases(
    "setting, headers, shows",
    (None, {}, True),
    (None, {"host": "127.0.0.1:8000"}, True),
    (None, {"host": "photos.example"}, False),
    (None, {"x-forwarded-for": "192.0.2.7"}, False),
    (True, {"host": "photos.example"}, True),
    (False, {}, False),
)
async def test_visitors_read_no_operators_commands(setting, headers, shows):
    service = Advising(Settings(operator_hints=setting))
    async with asgi_client(create_api(service)) as client:
        answer = await client.get("/v1/models", headers=headers)
    assert (answer.json()["hint"] == "tandem models fetch imagenet") == shows
    assert bool(answer.json()["hint"]) == shows == answer.json().get("operator_hints", False)
