"""Cores read from drawn sysfs trees, and the places they are divided into."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.compute.cpu_affinity import Core, cpu_list, place_replicas, read_cores


def draw(folder: Path, nodes: list[str], siblings: list[str], packages: list[int]) -> Path:
    """Write a sysfs: a cpulist for each node, the sibling list and socket of each CPU."""
    for number, cpus in enumerate(nodes):
        node = folder / "node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus + "\n")
    (folder / "node" / "nodes_are_elsewhere").mkdir(parents=True)
    for cpu, (threads, package) in enumerate(zip(siblings, packages, strict=True)):
        topology = folder / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(threads + "\n")
        (topology / "physical_package_id").write_text(f"{package}\n")
    return folder


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two sockets of two cores with two threads; CPU n and n + 4 are one core, as on a Xeon."""
    siblings = [f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)]
    return draw(tmp_path, ["0-1,4-5", "2-3,6-7"], siblings, [0, 0, 1, 1] * 2)


def test_threads_of_a_core_and_nodes_are_seen(two_sockets: Path) -> None:
    assert read_cores(range(8), two_sockets) == [
        Core(0, 0, (0, 4)),
        Core(0, 0, (1, 5)),
        Core(1, 1, (2, 6)),
        Core(1, 1, (3, 7)),
    ]


def test_only_allowed_cpus_count(two_sockets: Path) -> None:
    assert read_cores([1, 4, 7], two_sockets) == [
        Core(0, 0, (1,)),
        Core(0, 0, (4,)),
        Core(1, 1, (7,)),
    ]


def test_a_kernel_that_tells_nothing_has_cores_of_one_thread(tmp_path: Path) -> None:
    assert read_cores([0, 3], tmp_path / "none") == [Core(0, 0, (0,)), Core(0, 0, (3,))]


def test_a_virtual_machine_without_sockets(tmp_path: Path) -> None:
    drawn = draw(tmp_path, ["0-1"], ["0", "1"], [-1, -1])
    assert read_cores([0, 1], drawn) == [Core(0, 0, (0,)), Core(0, 0, (1,))]


def test_this_machine_is_read() -> None:
    found = [cpu for core in read_cores() for cpu in core.cpus]
    assert len(found) == len(set(found)) > 0


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("5", [5]), ("", []), ("\n", []), ("x", [])],
)
def test_the_kernels_lists(text: str, cpus: list[int]) -> None:
    assert cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("num_cpus", "places"),
    [
        (2, [(0, 4), (1, 5), (2, 6), (3, 7)]),  # a core each, with both its threads
        (4, [(0, 1, 4, 5), (2, 3, 6, 7)]),  # a socket each
        (3, [(0, 1, 4, 5), (2, 3, 6, 7)]),  # whole cores: one thread more than asked
        (5, []),  # no node has as many
    ],
)
def test_places(two_sockets: Path, num_cpus: int, places: list[tuple[int, ...]]) -> None:
    assert place_replicas(read_cores(range(8), two_sockets), num_cpus) == places


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=24),
    st.integers(1, 9),
)
def test_whatever_the_machine(drawn: list[tuple[int, int]], num_cpus: int) -> None:
    cores = [
        Core(node, node // 2, tuple(range(2 * i, 2 * i + threads)))
        for i, (node, threads) in enumerate(drawn)
    ]
    places = place_replicas(cores, num_cpus)
    of_cpu = {cpu: core for core in cores for cpu in core.cpus}
    used = [cpu for place in places for cpu in place]
    assert len(used) == len(set(used)), "two replicas share a CPU"
    for place in places:
        assert num_cpus <= len(place) <= num_cpus + 1
        assert len({of_cpu[cpu].node for cpu in place}) == 1, "a place spans two nodes"
        assert all(set(of_cpu[cpu].cpus) <= set(place) for cpu in place), "a core is shared"
