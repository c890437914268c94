"""/v1/traffic with real stages on tiny versions: seen, changed, refused; and what answers say."""

import asyncio
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest

from app.environment import MIB
from app.errors import NotReadyError, UnknownModelError
from app.graph.request import ClassifyRequest, TensorRequest
from app.http.api import create_api
from app.queueing import batch_queue
from app.serve import set_stages
from app.serve.gateway import Assembly, assemble
from app.serve.replica import Hub
from app.settings import Settings
from app.telemetry.metric_table import TRAFFIC_COMPARED, TRAFFIC_SHARE
from app.telemetry.metrics import RequestObserver
from app.traffic.control import TrafficControl
from app.traffic.plan import MAX_EARLIER, Figures, Plan, Split, TrafficBook
from calibration.sets.transaction import write_manifest
from models.manifest import read_manifest
from tests.support.asgi_client import asgi_client
from tests.support.cases import cases
from tests.support.open_inference import images, infer
from tests.support.tiny_networks import COLORS, expected_label, with_accuracy
from tests.support.tiny_versions import (
    GOOD,
    SURER,
    WRONG,
    LocalHandle,
    add_version,
    name_of,
    pictures,
    write_versions,
)

KEY = "0123456789abcdef0123456789abcdef"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_versions(tmp_path_factory.mktemp("sets") / "tiny", GOOD, SURER, WRONG)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.serve.replica.start_replica", lambda _: None)


class Served:
    """A graph of versions, its HTTP interface, and the deployment Traffic beside it."""

    def __init__(self, settings: Settings) -> None:
        self.graph: Assembly = assemble(settings)
        assert self.graph.versions is not None
        self.handle = LocalHandle(Hub(settings, TrafficBook(self.graph.versions.graph.plan)))
        self.control: TrafficControl = self.graph.versions.control(cast("Any", self.handle))
        api = create_api(self.graph.service, traffic=self.control)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(api), base_url="http://localhost", headers=HEADERS
        )

    async def versions_of(self, number: int) -> Counter[str]:
        """Send pictures; return how many each version answered, by fingerprint."""
        counts: Counter[str] = Counter()
        for color, data in pictures(number):
            answer = (await self.client.post("/v1/classify", content=data)).json()
            counts[answer["model_version"]] += 1
            if answer["model_version"] != self.wrong:
                assert answer["predictions"][0]["label"] == expected_label(color)
        return counts

    async def change(self, shares: Any = None, **more: Any) -> httpx.Response:
        fields = more if shares is None else {"shares": shares, **more}
        return await self.client.put("/v1/traffic", json=fields)

    async def status(self) -> dict[str, Any]:
        """Return what GET says."""
        return (await self.client.get("/v1/traffic")).json()

    async def settle(self) -> None:
        """Wait until no copy is under way."""
        assert self.graph.versions is not None
        while tasks := self.graph.versions.graph._lane._tasks:
            await asyncio.wait(tasks)

    wrong = ""


@pytest.fixture
async def served(names):
    good, better, wrong = names
    of = Served(settings_of(traffic={good: 100, better: 0, wrong: 0}, shadow=better))
    of.wrong = wrong[-12:]
    yield of
    await of.client.aclose()


def settings_of(**more: object) -> Settings:
    return Settings.model_validate({"compile_cache": None, "open_traffic": True} | more)


async def test_the_plan_and_the_comparison_are_seen(served, names, told):
    good, better, wrong = map(name_of, names)
    served.graph.versions.graph.take(served.graph.versions.graph.plan)
    assert await served.versions_of(12) == {good[-12:]: 12}
    await served.settle()
    status = await served.status()
    assert (status["revision"], status["main"], status["shadow"]) == (0, good, better)
    assert status["shares"] == {good: 100, better: 0, wrong: 0}
    assert (status["num_gateways"], status["num_current"]) == (1, 1)
    (pair,) = status["comparisons"]
    assert (pair["reference"], pair["version"]) == (good, better)
    assert (pair["compared"], pair["agreed"]) == (12, 12)
    assert 0 < pair["total_variation"] < 0.1
    of_good, of_better = (status["versions"][name] for name in (good, better))
    assert (of_good["answered"], of_good["copies"]) == (12, 0)
    assert (of_better["answered"], of_better["copies"]) == (0, 12)
    assert 0 < of_better["compute_ms"] <= of_better["work_ms"]
    assert told.of(TRAFFIC_COMPARED) == {(better[-12:], "yes"): 12}
    assert told.of(TRAFFIC_SHARE)[(good[-12:],)] == 100


async def test_copies_do_not_make_the_service_grow(served, names):
    """Autoscaling goes by the CPU time of an answered image."""
    better, usage = name_of(names[1]), served.graph.service.usage
    usage._cpu_s = lambda: 100.0
    await served.versions_of(12)
    await served.settle()
    figures = usage.figures()
    assert figures["images_done"] == 12
    of_better = (await served.status())["versions"][better]
    networks_ms = of_better["compute_ms"] * of_better["copies"] * served.graph.stages.threads_each
    assert 0 < networks_ms < 100_000 - figures["cpu_ms"]  # their decoding is left out too


async def test_a_change_divides_requests_and_a_rollback_undoes_it(served, names):
    good, better, _ = map(name_of, names)
    status = (await served.change({good: 60, better: 40}, revision=0)).json()
    assert (status["revision"], status["num_current"]) == (1, 1)
    counts = await served.versions_of(60)
    assert 12 <= counts[better[-12:]] <= 36
    assert counts == await served.versions_of(60)  # the same pictures go the same ways
    assert (await served.change({better: 100})).status_code == 200
    assert await served.versions_of(5) == {better[-12:]: 5}
    for shares in ({good: 60, better: 40}, {good: 100, better: 0, name_of(names[2]): 0}):
        status = (await served.change(rollback=True)).json()
        assert status["shares"] == shares
    assert await served.versions_of(5) == {good[-12:]: 5}
    refused = await served.change(rollback=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "bad_parameter")


async def test_the_service_describes_itself_as_the_version_with_the_largest_share(served, names):
    better = name_of(names[1])
    await served.change({better: 100})
    assert (await served.client.get("/v1/models")).json()["model_version"] == better[-12:]
    assert (await served.client.get("/v2/models/tiny")).json()["versions"] == [better[-12:], "1"]
    assert (await served.client.get("/readyz")).status_code == 200


async def test_an_inference_answer_names_the_version_that_answered(served, names):
    good, better, _ = map(name_of, names)
    await served.change({good: 50, better: 50})
    versions = set()
    for _, data in pictures(30):
        answer = await infer(served.client, images(data), "/v2/models/tiny")
        versions.add(answer.json()["model_version"])
    assert versions == {good[-12:], better[-12:]}
    for _, data in pictures(10):  # who names a version gets no other
        path = f"/v2/models/tiny/versions/{good[-12:]}"
        answer = await infer(served.client, images(data), path)
        assert answer.json()["model_version"] == good[-12:]


async def test_classes_in_another_order_are_mapped(tmp_path):
    (first,) = write_versions(tmp_path / "tiny", GOOD)
    moved = add_version(tmp_path / "tiny", gains=SURER, order=(2, 0, 1))
    served = Served(settings_of(traffic={first: 60, moved: 40}, compare_ratio=1.0, cache="none"))
    indices = {first[-12:]: dict(zip(COLORS, (0, 1, 2), strict=True))}
    indices[moved[-12:]] = dict(zip(COLORS, (1, 2, 0), strict=True))
    versions = set()
    for color, data in pictures(30):
        answer = (await served.client.post("/v1/classify", content=data)).json()
        versions.add(version := answer["model_version"])
        best = answer["predictions"][0]  # as its own labels have it
        assert (best["label"], best["index"]) == (expected_label(color), indices[version][color])
        answer = await infer(served.client, images(data), "/v2/models/tiny")
        assert answer.json()["model_version"] == version
        rows, labels = answer.json()["outputs"]
        assert labels["data"] == [expected_label(color)]  # as /v2 describes the model
        assert int(np.argmax(rows["data"])) == indices[first[-12:]][color]
        await served.settle()
    assert versions == set(indices)
    (pair,) = (await served.status())["comparisons"]
    assert (pair["compared"], pair["agreed"]) == (60, 60)
    assert 0 < pair["total_variation"] < 0.1
    await served.client.aclose()


@cases(
    "content, status, message",
    ({"shares": {"tiny@000000000000": 100}}, 404, "not 000000000000, which it does not keep"),
    ({"shares": {"other@000000000000": 100}}, 404, "is no version of tiny: name it as tiny@"),
    ({"shares": {"GOOD": 90}}, 422, "sum to 90, not to 100"),
    ({"shares": {"GOOD": 100}, "shadow": "GOOD"}, 422, "is the shadow and answers 100 %"),
    ({"shares": {"GOOD": 100}, "revision": 7}, 409, "at revision 0, and yours was made from 7"),
    ({"shares": {"GOOD": 100}, "rollback": True}, 422, "rollback must be true, without shares"),
    ({"shares": {"GOOD": 100}, "more": 1}, 422, "send"),
    ({"shares": {"GOOD": 100}, "revision": "1"}, 422, "revision is not an integer"),
    ([], 422, "the body is no object"),
)
async def test_a_bad_change_is_refused_and_nothing_changes(served, names, content, status, message):
    text = httpx.Request("PUT", "http://tandem", json=content).content.decode()
    body = text.replace("GOOD", name_of(names[0]))
    refused = await served.client.put("/v1/traffic", content=body)
    assert refused.status_code == status, refused.text
    assert message in refused.json()["error"]["message"]
    assert (await served.status())["revision"] == 0
    assert (await served.client.put("/v1/traffic", content=b"{")).status_code == 422


async def test_a_version_that_is_not_loaded_is_loaded_from_the_sets_folder(names):
    good, better, _ = map(name_of, names)
    served = Served(settings_of(traffic={names[0]: 100}))
    shares = {good: 0, better: 100}
    status = (await served.change(shares)).json()
    assert list(status["versions"]) == [good, better]
    assert (status["shares"], status["num_current"]) == (shares, 1)
    assert await served.versions_of(5) == {better[-12:]: 5}


async def test_no_version_is_built_from_an_old_plan_or_beside_one_that_may_not_answer(names):
    good, better, wrong = map(name_of, names)
    served = Served(settings_of(traffic={names[0]: 100, names[2]: 0}))
    assert (await served.change({better: 100}, revision=7)).status_code == 409
    served.graph.versions._refused[wrong] = "INT8 lost 3 %"
    refused = await served.change({better: 50, wrong: 50})
    assert refused.json()["error"]["message"] == f"{wrong} must not answer clients: INT8 lost 3 %"
    assert list((await served.status())["versions"]) == [good, wrong]
    assert (await served.change({good: 100}, shadow=wrong)).status_code == 200


async def test_a_version_that_may_not_answer_is_not_built(names):
    good, better, _ = map(name_of, names)
    folder = Path(names[0].rpartition("@")[0]) / ".versions" / names[1][-12:]
    manifest = read_manifest(folder)
    served = Served(settings_of(traffic={names[0]: 100}))
    write_manifest(
        folder, with_accuracy(manifest, {"sure": 0.5, "ensemble": 0.5}, {"ensemble": 0.4})
    )
    try:
        refused = await served.change({good: 50, better: 50})
    finally:
        write_manifest(folder, manifest)
    assert refused.status_code == 422
    assert f"{better} must not answer clients" in refused.json()["error"]["message"]
    assert list((await served.status())["versions"]) == [good]


async def test_a_version_is_built_to_the_end_if_the_client_goes(names, monkeypatch):
    better = name_of(names[1])
    served = Served(settings_of(traffic={names[0]: 100}))
    versions, began, goes_on = served.graph.versions, threading.Event(), threading.Event()
    build, num_built = versions._stages.build, 0

    def slow(*args: Any, **options: Any) -> object:
        nonlocal num_built
        num_built += 1
        began.set()
        goes_on.wait()
        return build(*args, **options)

    monkeypatch.setattr(versions._stages, "build", slow)
    going = asyncio.create_task(served.control.change({"shares": {better: 100}}))
    await asyncio.to_thread(began.wait)
    going.cancel()
    await asyncio.wait([going])
    assert better in +served.control._asked  # what is built is not unloaded before they ask again
    again = asyncio.create_task(served.change({better: 100}))
    await asyncio.sleep(0)
    goes_on.set()
    assert (await again).status_code == 200
    assert num_built == 1


async def test_a_version_has_the_name_of_the_precision_that_is_served(names):
    better, other = name_of(names[1]), "tiny@000000000000"
    served, own = Served(settings_of(traffic={names[0]: 100})), settings_of(model_set=names[1])
    with pytest.raises(UnknownModelError, match=f"{other} is served as {better}: use that name"):
        served.graph.versions._build(own, other, is_to_answer=True)


async def left_by_ten_changes(served: Served, name: str) -> None:
    """Change the traffic until no plan of the last ten names anything but ``name``."""
    for _ in range(MAX_EARLIER + 1):
        assert (await served.change({name: 100})).status_code == 200


async def unloaded(served: Served) -> None:
    versions = served.graph.versions
    assert versions is not None
    await asyncio.wait_for(asyncio.gather(*versions._unloads), 30)


async def test_a_version_that_no_plan_of_the_last_ten_names_is_unloaded(names):
    good, better, wrong = map(name_of, names)
    served = Served(settings_of(traffic={names[0]: 100}, shadow=names[1], cache="local"))
    network = weakref.ref(served.graph.versions._built[better].members[0]._network)
    await served.versions_of(6)
    await served.settle()
    await served.change({wrong: 100})
    for _ in range(MAX_EARLIER - 1):
        await served.change({good: 100})
    assert list((await served.status())["versions"]) == [good, better, wrong]
    built = served.graph.versions._built[wrong]
    await served.change({good: 100})
    assert list((await served.status())["versions"]) == [good, wrong]
    await unloaded(served)
    assert network() is None
    assert len(served.graph.stages.members) == 2
    # What a plan names is as it was: a rollback of all changes loads nothing.
    for _ in range(MAX_EARLIER):
        status = (await served.change(rollback=True)).json()
    assert (status["shares"], served.graph.versions._built[wrong]) == ({wrong: 100}, built)
    assert (await served.change({better: 100})).status_code == 200  # loaded anew
    assert await served.versions_of(3) == {better[-12:]: 3}


async def test_a_version_is_unloaded_once_no_request_uses_it(names, monkeypatch):
    good, better, _ = map(name_of, names)
    served = Served(settings_of(traffic={names[0]: 0, names[1]: 100}))
    versions, ends = served.graph.versions, asyncio.Event()
    decoder = versions._built[better].decoder
    decode = decoder.decode

    async def slow(*args: Any, **more: Any) -> Any:
        await ends.wait()
        return await decode(*args, **more)

    monkeypatch.setattr(decoder, "decode", slow)
    (color, data), *_ = pictures(1)
    asked = asyncio.create_task(served.client.post("/v1/classify", content=data))
    while not versions.graph._running.total():
        await asyncio.sleep(0)
    (network,) = [member._network for member in versions._built[better].members]
    await left_by_ten_changes(served, good)
    assert list(versions._built) == [good]
    assert await served.versions_of(3) == {good[-12:]: 3}
    assert len(served.graph.stages.members) == 2
    ends.set()
    answer = (await asked).json()
    assert (answer["model_version"], answer["predictions"][0]["label"]) == (
        better[-12:],
        expected_label(color),
    )
    await unloaded(served)
    assert len(served.graph.stages.members) == 1
    assert served.graph.stages.scheduler.num_ahead > 0  # no other threads take turns any more
    assert network is not None
    gone = TensorRequest(version=better[-12:])
    with pytest.raises(UnknownModelError, match=f"{better[-12:]} has just been unloaded"):
        versions.graph._chosen(ClassifyRequest([data], 1, 9, "r", RequestObserver(), tensors=gone))
    unnamed = ClassifyRequest([], 1, 9, "r", RequestObserver())
    unnamed = unnamed._replace(
        tensors=TensorRequest(np.zeros((1, 2, 2, 3), np.uint8), classes_of=better[-12:])
    )
    with pytest.raises(NotReadyError, match="try again in a second"):  # the client named none
        versions.graph._chosen(unnamed)


async def test_what_a_change_has_loaded_stays_until_it_is_made(names, monkeypatch):
    _, better, wrong = map(name_of, names)
    served = Served(settings_of(traffic={names[0]: 100}))
    versions, goes_on = served.graph.versions, threading.Event()
    build = versions._stages.build

    def slow(*args: Any, **options: Any) -> object:
        if better in versions._built:
            goes_on.wait()
        return build(*args, **options)

    monkeypatch.setattr(versions._stages, "build", slow)
    changing = asyncio.create_task(served.change({better: 50, wrong: 50}))
    while better not in versions._built:
        await asyncio.sleep(0.01)
    assert better in (await served.status())["versions"]  # which is when others are unloaded
    goes_on.set()
    assert (await changing).status_code == 200


async def test_a_version_for_which_memory_is_too_small_is_refused_with_the_figures(
    names, monkeypatch
):
    good, better, _ = map(name_of, names)
    served = Served(settings_of(traffic={names[0]: 100}))
    monkeypatch.setattr(set_stages, "free_memory", lambda **_: 60 * 10**6)
    refused = await served.change({better: 100})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    error = refused.json()["error"]
    assert error["code"] == "no_memory"
    for words in ("loading tiny needs about ", " MB of memory, and 67", "60 MB are free", "batch"):
        assert words in error["message"]
    assert list((await served.status())["versions"]) == [good]
    assert (await served.change({good: 100})).status_code == 200  # nothing is to be loaded
    assert await served.versions_of(3) == {good[-12:]: 3}
    monkeypatch.setattr(set_stages, "free_memory", lambda **_: 80 * 10**6)
    assert (await served.change({better: 100})).status_code == 200


async def test_a_gateway_loads_what_another_ones_plan_names(names):
    good, better, _ = map(name_of, names)
    first, second = (Served(settings_of(traffic={names[0]: 100})) for _ in range(2))
    second.handle.deployment = first.handle.deployment
    await first.change({better: 100})
    assert await first.versions_of(3) == {better[-12:]: 3}
    assert await second.versions_of(3) == {good[-12:]: 3}
    await second.client.get("/v1/traffic")  # it hears of the plan, and begins to load
    loading = second.control._loading
    assert loading
    await loading
    status = await second.status()
    assert (status["num_gateways"], status["num_current"]) == (2, 2)
    assert await second.versions_of(3) == {better[-12:]: 3}


async def test_gateways_with_two_plans_of_one_revision_come_to_serve_the_same(names):
    good, better, _ = map(name_of, names)
    first, second = (Served(settings_of(traffic={n: 50 for n in names[:2]})) for _ in range(2))
    await first.change({good: 90, better: 10})
    await second.change({good: 80, better: 20})
    second.handle.deployment = first.handle.deployment
    graphs = [of.graph.versions.graph for of in (first, second)]
    assert [graph.plan.revision for graph in graphs] == [1, 1]
    for of in (second, first, second, first):
        status = await of.status()
    assert graphs[0].plan == graphs[1].plan
    assert (status["num_gateways"], status["num_current"]) == (2, 2)


async def test_requests_are_answered_while_the_deployment_is_away(served, names):
    better = name_of(names[1])
    await served.change({better: 100})
    away, served.handle.deployment = served.handle.deployment, None
    assert (await served.client.get("/v1/traffic")).status_code == 503
    assert await served.versions_of(3) == {better[-12:]: 3}
    # It comes back knowing nothing, and learns the plan from the Gateway.
    first = Plan.first(away._book.facts.earlier[0])
    served.handle.deployment = Hub(Settings(), TrafficBook(first))
    status = await served.status()
    assert (status["revision"], status["shares"]) == (1, {better: 100})
    assert await served.versions_of(3) == {better[-12:]: 3}


async def test_a_change_after_the_deployments_restart_is_made_from_the_gateways_plan(served, names):
    good, better, _ = map(name_of, names)
    first = served.handle.deployment._book.facts
    for shares in ({better: 100}, {good: 50, better: 50}):
        await served.change(shares)
    served.handle.deployment = Hub(Settings(), TrafficBook(first))
    answer = await served.change({good: 90, better: 10})
    assert (answer.status_code, answer.json()["revision"]) == (200, 3)
    assert answer.json()["shares"] == {good: 90, better: 10}


async def test_a_change_that_another_gateways_plan_replaces_is_a_conflict(served, names):
    """This Gateway was away for two changes, and the deployment began anew after them."""
    good, better, _ = map(name_of, names)
    book = served.handle.deployment._book
    newer = book.facts.changed(Split({better: 100.0})).changed(Split({good: 50.0, better: 50.0}))
    change = book.change

    def changed(split: object, revision: int | None) -> int:
        made: int = change(split, revision)
        book.report("other", newer, Figures())
        return made

    book.change = changed
    answer = await served.change({good: 90, better: 10})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "plan_changed")
    assert "revision 2 replaced this change, revision 1" in answer.json()["error"]["message"]


async def test_a_shadow_whose_network_hangs_keeps_nothing_of_the_others(served, names, monkeypatch):
    """As many hang as there are threads, each for ever; every photo is answered."""
    good, better, _ = map(name_of, names)
    monkeypatch.setattr(batch_queue, "SHADOW_RUN_S", 0.05)
    ends, (member,) = threading.Event(), served.graph.versions._built[better].members
    monkeypatch.setattr(member, "_predict", lambda _: ends.wait())
    try:
        for _ in range(member.calls_at_once):
            assert await served.versions_of(12) == {good[-12:]: 12}
            await served.settle()
            await served.change({good: 100}, shadow=better)
        assert await served.versions_of(12) == {good[-12:]: 12}
        await served.graph.check_health()  # Serve must not replace the Gateway for it
        status = await served.status()
        assert status["versions"][better]["copies_failed"] >= member.calls_at_once
        assert status["versions"][better]["copies"] == 0
        await served.settle()  # a copy of the last photos may just have begun to hang
    finally:
        ends.set()


async def test_without_keys_the_settings_say_who_may_change_it(names, monkeypatch):
    good = names[0]
    locked = Served(settings_of(traffic={good: 100}, open_traffic=None))
    refused = await locked.change({name_of(good): 100})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "traffic_locked")
    assert (await locked.client.get("/v1/traffic")).status_code == 200
    monkeypatch.setenv("TANDEM_API_KEYS", KEY)
    keyed = Served(settings_of(traffic={good: 100}, open_traffic=None))
    assert (await keyed.change({name_of(good): 100})).status_code == 200
    keyed.client.headers.clear()
    for answer in (await keyed.client.get("/v1/traffic"), await keyed.client.put("/v1/traffic")):
        assert answer.status_code == 401


async def test_a_service_without_versions_says_so(names):
    service = assemble(Settings(model_set=names[0], compile_cache=None)).service
    async with asgi_client(create_api(service)) as client:
        for method in ("GET", "PUT"):
            answer = await client.request(method, "/v1/traffic")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_traffic")


async def test_each_version_has_its_own_cache(names):
    good, better, _ = names
    served = Served(settings_of(traffic={good: 100, better: 0}, cache="local"))
    (_, data), *_ = pictures(1)
    answers = []
    for name in (good, good, better, better, good):
        await served.change({name_of(name): 100})
        answer = (await served.client.post("/v1/classify", content=data)).json()
        answers.append((answer["model_version"] == name[-12:], answer.get("cached", False)))
    assert answers == [(True, is_cached) for is_cached in (False, True, False, True, True)]


async def test_the_caches_of_all_versions_have_one_bound(names):
    good, better, _ = names
    served = Served(settings_of(traffic={good: 60, better: 40}, cache="local", cache_mib=1))
    caches = [graph.cache for graph in served.graph.versions.graph.versions.values()]
    for number, cache in enumerate(caches):
        for image in range(1000):
            cache.keep(b"%d %d" % (number, image), np.zeros((1, 256), np.float32))
    assert len(caches) == 2
    assert sum(store.num_bytes for store in {cache._store for cache in caches}) <= MIB
