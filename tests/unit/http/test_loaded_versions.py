"""Versions that a change of traffic loads, and that are unloaded once no plan names them."""

import asyncio
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.errors import NotReadyError, UnknownModelError
from app.graph.request import ClassifyRequest, TensorRequest
from app.serve import set_stages
from app.telemetry.metrics import RequestObserver
from app.traffic.plan import MAX_EARLIER
from calibration.sets.transaction import write_manifest
from models.manifest import read_manifest
from tests.support.served_versions import Served, settings_of
from tests.support.tiny_networks import expected_label, with_accuracy
from tests.support.tiny_versions import GOOD, SURER, WRONG, name_of, pictures, write_versions


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_versions(tmp_path_factory.mktemp("sets") / "tiny", GOOD, SURER, WRONG)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.serve.replica.start_replica", lambda _: None)


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
