"""The choice between a replica on the caller's node and one elsewhere, and which are silent."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from app.serve import locality_router
from app.serve.channels import SUSPECT_AFTER_S, known_replicas, note_silent
from tests.support.cases import cases
from tests.support.hand_clock import HandClock


def ranks(queues: dict[str, int | None]) -> list[list[str]]:
    """Choose among replicas whose names say where they are."""
    near = [name for name in queues if name.startswith("near")]
    far = [name for name in queues if name.startswith("far")]
    return locality_router.rank_replicas(near, far, queues.__getitem__)


@cases(
    "near, far, ranked",
    *((queue, queue, [["near"], ["far"]]) for queue in (0, 3, 60)),
    (4 + locality_router.LOCALITY_SLACK, 4, [["near"], ["far"]]),
    (5 + locality_router.LOCALITY_SLACK, 4, [["far"], ["near"]]),  # beyond the slack
    (None, 0, [["near", "far"]]),  # not known: both are asked
    (0, None, [["near", "far"]]),
)
def test_the_near_one_is_called_within_the_slack(near, far, ranked) -> None:
    assert ranks({"near": near, "far": far}) == ranked


@pytest.mark.parametrize("side", ["near", "far"])
def test_where_there_is_one_side_alone_two_are_compared(side: str) -> None:
    (rank,) = ranks({f"{side}1": 5, f"{side}2": 0, f"{side}3": None})
    assert len(set(rank)) == 2
    assert ranks({side: 7}) == [[side]]


def test_load_that_arrives_at_one_node_spreads_over_all() -> None:
    queues: dict[str, int | None] = {"near": 0, "far1": 0, "far2": 0}
    for _ in range(300):
        chosen = ranks(queues)[0][0]
        queues[chosen] = (queues[chosen] or 0) + 1
    lengths = sorted(length or 0 for length in queues.values())
    assert lengths[-1] - lengths[0] <= 3


def test_of_many_near_ones_a_short_queue_is_likelier() -> None:
    queues: dict[str, int | None] = {"near1": 0, "near2": 9, "near3": 9, "far": 50}
    counted = Counter(ranks(queues)[0][0] for _ in range(600))
    assert set(counted) == {"near1", "near2", "near3"}
    assert counted["near1"] > counted["near2"] + counted["near3"]


def router_of(app_name: str) -> locality_router.LocalityRouter:
    """Made with the arguments that Serve gives: one that it does not take would hang every call."""
    deployment: Any = DeploymentID(name="member", app_name=app_name)
    return locality_router.LocalityRouter(
        deployment_id=deployment,
        handle_source=DeploymentHandleSource.REPLICA,
        self_node_id="here",
        self_actor_id="gateway",
        self_actor_handle=None,
        use_replica_queue_len_cache=True,
        create_replica_wrapper_func=lambda replica: replica,
        prefer_local_node_routing=False,
        prefer_local_az_routing=False,
        self_availability_zone=None,
    )


def replicas_of(router: locality_router.LocalityRouter, nodes: dict[str, str]) -> list[Any]:
    """Return replicas by their nodes, as the router is given them."""
    deployment: Any = router._called
    unused: dict[str, Any] = {"multiplexed_model_ids": set(), "availability_zone": None}
    return [
        SimpleNamespace(
            replica_id=ReplicaID(name, deployment),
            node_id=node,
            push_proxy_handle=lambda _: None,
            **unused,
        )
        for name, node in nodes.items()
    ]


async def test_the_process_knows_which_replicas_there_are() -> None:
    router = router_of("counted")
    assert known_replicas("counted", "member") == (1, ())
    router.update_replicas(replicas_of(router, {"a": "here", "b": "there", "c": "here"}))
    assert known_replicas("counted", "member") == (3, ("a", "c"))
    assert known_replicas("counted", "other") == (1, ())


async def test_one_that_is_silent_on_its_channel_is_called_by_nobody() -> None:
    router = router_of("silent")
    near, far = replicas = replicas_of(router, {"quiet1": "here", "quiet2": "there"})
    router.update_replicas(replicas)

    async def never(deadline_s: float) -> int:
        raise TimeoutError

    near.get_queue_len = never
    for replica in replicas:
        router.on_new_queue_len_info(replica.replica_id, 0)
    note_silent("quiet1", is_silent=True)
    assert await router.choose_replicas(replicas) == [[far]]
    note_silent("quiet1", is_silent=False)
    assert await router.choose_replicas(replicas) == [[near], [far]]


# Replicas that say nothing: when they count as silent, and when they are asked.


def test_one_that_does_not_answer_is_silent_until_a_while_after_it_does() -> None:
    clock = HandClock()
    silence = locality_router.FailureDetector(clock)
    clock.now += 1000
    assert not silence.is_suspected("a")  # it was asked nothing
    silence.call_sent("a")
    clock.now += SUSPECT_AFTER_S
    silence.call_sent("a")  # since the first one
    assert not silence.is_suspected("a")
    clock.now += 0.01
    assert [silence.is_suspected(name) for name in "ab"] == [True, False]
    silence.heard_from("a")
    assert silence.is_suspected("a")  # its node may be slow
    clock.now += locality_router.LATE_FOR_S
    assert not silence.is_suspected("a")
    silence.call_sent("a")
    assert not silence.is_suspected("a")


@pytest.mark.parametrize(("late_s", "is_left"), [(0.4, False), (0.6, True)])
def test_one_that_acknowledges_late_is_left_for_a_while(late_s, is_left) -> None:
    clock = HandClock()
    silence = locality_router.FailureDetector(clock)
    silence.call_sent("a")
    clock.now += late_s
    silence.heard_from("a")
    clock.now += locality_router.LATE_FOR_S - 0.1
    assert silence.is_suspected("a") == is_left
    clock.now += 0.2
    assert not silence.is_suspected("a")


def test_a_silent_one_is_asked_once_every_so_often() -> None:
    clock = HandClock()
    silence = locality_router.FailureDetector(clock)
    assert silence.should_probe("a")
    clock.now += locality_router.PROBE_EVERY_S / 2
    assert not silence.should_probe("a")
    clock.now += locality_router.PROBE_EVERY_S
    assert silence.should_probe("a")


def test_replicas_that_are_gone_are_forgotten() -> None:
    clock = HandClock()
    silence = locality_router.FailureDetector(clock)
    for name in "ab":
        silence.call_sent(name)
    clock.now += 2 * SUSPECT_AFTER_S
    silence.retain(["b"])
    assert [silence.is_suspected(name) for name in "ab"] == [False, True]
    silence.heard_from("b")
    silence.retain([])
    assert not silence.is_suspected("b")  # nor is its late answer remembered
