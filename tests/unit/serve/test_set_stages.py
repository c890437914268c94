"""The stages of a set in a running process: they join, and are taken out without a trace."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.errors import NotReadyError
from app.graph.request import ClassifyRequest
from app.queueing.scheduler import QueueReport
from app.serve.gateway import Assembly, assemble
from app.serve.set_stages import SetStages
from app.settings import Settings
from app.telemetry.metric_table import QUEUE_AGE_MS, QUEUE_LENGTH
from app.telemetry.metrics import RequestObserver
from models.errors import ModelSetError
from models.model_set import load_model_set
from tests.support.several_sets import FIRST, SECOND, labels_of, write_two_sets
from tests.support.steps import settle
from tests.support.tiny_networks import SIZE, picture, write_tiny_set


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    return write_two_sets(tmp_path)


@pytest.fixture
def graph(folders) -> Assembly:
    return assemble(settings_of(folders[0]))


IMAGES = np.zeros((1, 2 * SIZE, 2 * SIZE, 3), np.uint8)


def settings_of(folder: str) -> Settings:
    return Settings(model_set=folder, compile_cache=None)


def joined(graph: Assembly, folder: str) -> SetStages:
    """Return stages that join, built as at run time: on another thread than the loop's."""
    made: list[SetStages] = []

    def build() -> None:
        made.append(graph.stages.build(settings_of(folder), load_model_set(folder)))

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    graph.stages.join(made[0])
    return made[0]


async def label_of(stages: SetStages, color: str) -> str:
    request = ClassifyRequest([picture(color)], 1, 10.0, "id", RequestObserver())
    (answer,) = await stages.ensemble.run(request)
    return answer.predictions[0].label


async def test_a_set_joins_and_is_taken_out_while_the_other_answers(graph, folders, told):
    (first,) = graph.stages.joined
    threads = graph.stages._threads
    alone = threads.scheduler._queues.copy()
    second = joined(graph, folders[1])
    assert await label_of(second, "red") == labels_of("red")[SECOND]
    assert await label_of(first, "red") == labels_of("red")[FIRST]
    assert len(threads.scheduler._queues) == len(alone) + 1
    assert graph.stages.members == [*first.members, *second.members]
    await graph.check_health()
    network = weakref.ref(second.members[0]._network)
    await graph.stages.remove(second)
    assert network() is None  # without a collection of cycles: its memory is free at once
    assert (threads.scheduler._queues, graph.stages.members) == (alone, [*first.members])
    assert told.of(QUEUE_LENGTH)["sure",] == 0
    assert await label_of(first, "blue") == labels_of("blue")[FIRST]
    await graph.check_health()


async def test_two_versions_of_a_set_have_one_queue_length_for_each_member(graph, folders, told):
    """What clients wait for in one is not hidden by the other's queue, which is empty."""
    (first,) = graph.stages.joined
    second = joined(graph, folders[0])
    first.members[0]._metrics._report = lambda: QueueReport(5, 1.5)
    for stages in (first, second):
        await label_of(stages, "red")
    name = first.members[0]._label
    assert (told.of(QUEUE_LENGTH)[name,], told.of(QUEUE_AGE_MS)[name,]) == (5, 1500)
    await graph.stages.remove(second)
    assert told.of(QUEUE_LENGTH)[name,] == 5


async def test_nothing_is_left_of_a_taken_out_set(graph, folders):
    second = joined(graph, folders[1])
    await label_of(second, "red")
    parts = (second, *second.members, second.decoder, second.combiner)
    left = [weakref.ref(part) for part in parts]
    await graph.stages.remove(second)
    del second, parts
    gc.collect()
    assert [part() for part in left] == [None] * len(left)


async def test_what_waits_for_a_set_that_is_taken_out_fails_at_once(graph, folders):
    """A probe of readiness is counted nowhere: it would wait, and /readyz with it."""
    second = joined(graph, folders[1])
    (member,) = second.members
    call = member.classify(IMAGES, 10.0)  # its turn is when the loop turns
    await graph.stages.remove(second)
    assert isinstance(call.exception(), NotReadyError)
    assert not member.usage.num_under_way


async def test_the_last_batch_ends_before_the_network_goes(graph, folders, monkeypatch):
    second = joined(graph, folders[1])
    (member,) = second.members
    may_end, begun = threading.Event(), threading.Event()
    predict = member._network.predict_all

    def slow(batch: Any) -> Any:
        begun.set()
        may_end.wait()
        return predict(batch)

    monkeypatch.setattr(member._network, "predict_all", slow)
    call = member.classify(IMAGES, 10.0)
    await asyncio.to_thread(begun.wait)
    removing = asyncio.create_task(graph.stages.remove(second))
    await settle()
    assert not removing.done()
    may_end.set()
    await removing
    assert (await call).probabilities.shape == (1, 3)


async def test_batches_wait_for_decoded_images_while_there_is_one_set_alone(graph, folders):
    scheduler, alone = graph.stages._threads.scheduler, graph.stages.joined[0].decoder
    assert scheduler._source is alone
    second = joined(graph, folders[1])
    assert scheduler._source is None
    await graph.stages.remove(second)
    assert scheduler._source is alone


async def test_the_loop_decodes_less_while_another_sets_member_is_behind(graph, folders):
    (other,) = joined(graph, folders[1]).members
    decoder = graph.stages.joined[0].decoder
    assert decoder._leaves_loop_time()
    others = [other.classify(IMAGES, 10.0) for _ in range(99)]
    assert not decoder._leaves_loop_time()
    for call in others:
        call.cancel()


async def test_a_set_that_joins_later_has_the_queue_settings_of_the_others(graph, folders):
    graph.stages.reconfigure({"max_batch_size": 3})
    joined(graph, folders[1])
    assert {member._queue.max_batch_size for member in graph.stages.members} == {3}


def test_a_set_with_a_broken_file_leaves_nothing_behind(graph, folders):
    before = list(graph.stages._threads.scheduler._queues)
    model_set = load_model_set(folders[0])
    path = model_set.network_path(model_set.manifest.members[-1].name)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelSetError, match=f"{path} was altered"):
        graph.stages.build(settings_of(folders[0]), model_set)
    assert (graph.stages._threads.scheduler._queues, len(graph.stages.joined)) == (before, 1)


@pytest.mark.slow
def test_most_of_what_a_set_took_is_given_back_each_time(tmp_path: Path) -> None:
    """Of the bundled set, whose networks take hundreds of MB, beside a tiny one that stays.

    The tests above cover that nothing keeps the networks.
    """
    default = write_tiny_set(tmp_path / "tiny")
    program = [sys.executable, "-m", "tests.support.unloaded_memory", str(default), "imagenette"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    pss_mb = json.loads(done.stdout.splitlines()[-1])
    taken = [loaded - pss_mb["unloaded"][0] for loaded in pss_mb["loaded"]]
    assert min(taken) > 50, pss_mb  # else there is nothing to show
    for loaded, unloaded in zip(pss_mb["loaded"], pss_mb["unloaded"], strict=True):
        assert unloaded - pss_mb["unloaded"][0] < 0.4 * taken[0], pss_mb
        assert loaded < pss_mb["loaded"][0] + 0.4 * taken[0], pss_mb
