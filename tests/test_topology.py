"""Machines by the compiler's names."""

from __future__ import annotations

import pytest

from megakernel.target import CPU, find_target
from megakernel.topology import TOPOLOGIES, TopologyError, find_machine, smallest_topology


def test_a_topology_is_all_of_its_cores_unless_fewer_are_asked_for() -> None:
    assert find_machine("tpu7x:4x4x1", None) == (find_target("v7x"), 32)
    assert find_machine("tpu7x:4x4x1", 8) == (find_target("v7x"), 8)
    assert find_machine("v6e:2x2", None) == (find_target("v6e"), 4)


def test_a_target_is_one_core_unless_more_are_asked_for() -> None:
    assert find_machine("v7x", None) == (find_target("v7x"), 1)
    assert find_machine("v7x", 8) == (find_target("v7x"), 8)


def test_more_cores_than_a_topology_has_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"cores = 3; tpu7x:1x1x1 has 2"):
        find_machine("tpu7x:1x1x1", 3)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'tpu7x:9x9x9' is not known; known: cpu, v5e, .*, tpu7x:4x4x1"):
        find_machine("tpu7x:9x9x9", None)


@pytest.mark.parametrize(
    ("target", "cores", "name"),
    [
        ("v7x", 1, "tpu7x:1x1x1"),
        ("v7x", 2, "tpu7x:1x1x1"),
        ("v7x", 3, "tpu7x:2x2x1"),
        ("v7x", 16, "tpu7x:4x4x1"),
        ("v5p", 4, "v5p:2x2x1"),
        ("v6e", 1, "v6e:1x1"),
        ("v5e", 4, "v5e:2x2"),
    ],
)
def test_the_smallest_machine_with_room_is_chosen(target: str, cores: int, name: str) -> None:
    assert smallest_topology(find_target(target), cores).name == name


def test_too_many_cores_and_targets_without_a_compiler_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"cores = 33; the largest known machine of v7x has 32"):
        smallest_topology(find_target("v7x"), 33)
    with pytest.raises(TopologyError, match=r"target 'cpu' has no ahead-of-time compiler; choose one of v5e, v5p"):
        smallest_topology(CPU, 1)


def test_cores_are_chips_times_the_devices_of_a_chip() -> None:
    for topology in TOPOLOGIES.values():
        chips = 1
        for count in topology.chips:
            chips *= count
        assert topology.cores == chips * (2 if topology.target == "v7x" else 1)
        assert topology.one_chip == (chips == 1)
