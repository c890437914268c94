"""/v1/traffic with real stages on tiny versions: seen, changed, refused; and what answers say."""

import threading

import httpx
import numpy as np
import pytest

from app.environment import MIB
from app.http.api import create_api
from app.queueing import batch_queue
from app.serve.gateway import assemble
from app.serve.replica import Hub
from app.settings import Settings
from app.telemetry.metric_table import TRAFFIC_COMPARED, TRAFFIC_SHARE
from app.traffic.plan import Figures, Plan, Split, TrafficBook
from tests.support.asgi_client import asgi_client
from tests.support.cases import cases
from tests.support.open_inference import images, infer
from tests.support.served_versions import KEY, Served, settings_of
from tests.support.tiny_networks import COLORS, expected_label
from tests.support.tiny_versions import (
    GOOD,
    SURER,
    WRONG,
    add_version,
    name_of,
    pictures,
    write_versions,
)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_versions(tmp_path_factory.mktemp("sets") / "tiny", GOOD, SURER, WRONG)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.serve.replica.start_replica", lambda _: None)


@pytest.fixture
async def served(names):
    good, better, wrong = names
    of = Served(settings_of(traffic={good: 100, better: 0, wrong: 0}, shadow=better))
    of.wrong = wrong[-12:]
    yield of
    await of.client.aclose()


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
