"""What is tried, for machines of any size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.settings import Settings
from app.tune.candidates import (
    BATCH_SIZES,
    MAX_CANDIDATES,
    MAX_REPLICAS,
    Candidate,
    ReplicaLayout,
    candidates,
    client_counts,
    layouts,
)


def test_two_cores_have_three_layouts_with_all_batch_sizes():
    assert layouts(2) == [ReplicaLayout(1, 2, 2), ReplicaLayout(2, 1, 1), ReplicaLayout(1, 2, 1)]
    assert {c.batch_sizes for c in candidates(2)} == set(BATCH_SIZES)
    assert len(candidates(2)) == 12


def test_one_core_has_one_layout():
    assert layouts(1) == [ReplicaLayout(1, 1, 1)]


@given(st.integers(1, 512))
def test_candidates_use_every_core_and_stay_few(cores):
    found = candidates(cores)
    assert 1 <= len(found) <= MAX_CANDIDATES
    assert len(set(found)) == len(found)
    for layout in {c.layout for c in found}:
        assert layout.replicas * layout.cores == cores
        assert layout.streams * layout.threads == layout.cores
        assert 1 <= layout.replicas <= MAX_REPLICAS


@given(st.integers(1, 512))
def test_one_process_with_a_stream_a_core_is_always_tried(cores):
    """It is what serve_config.yaml does without being tuned."""
    assert Candidate(ReplicaLayout(1, cores, cores), Settings().batch_sizes) in candidates(cores)


def test_powers_of_two_come_first():
    replicas = [layout.replicas for layout in layouts(12)]
    assert replicas[:5] == [1, 2, 4, 3, 6]


@pytest.mark.parametrize(("clients", "sizes"), [(1, (1,)), (2, (1,)), (3, (1, 2)), (64, (1, 2, 4))])
def test_batches_that_so_many_clients_can_fill(clients, sizes):
    assert Candidate(ReplicaLayout(2, 1, 1), (1, 2, 4)).reachable(clients) == sizes


def test_clients_from_one_to_sixteen_a_core():
    assert client_counts(1) == [1, 2, 4, 8, 16]
    assert client_counts(4) == [1, 4, 8, 16, 32, 64]


def test_a_candidate_in_words():
    told = str(Candidate(ReplicaLayout(2, 4, 1), (1, 2)))
    assert told == "2 replicas of 4 cores, 1 stream of 4 threads; batches of 1, 2"
