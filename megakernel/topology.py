"""Machines that the TPU compiler knows by name, and which of them has room for so many cores."""

from __future__ import annotations

import dataclasses

from megakernel.target import TARGETS, Target, find_target


class TopologyError(ValueError):
    """No such machine, or none with so many cores."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Attributes:
    name: of the compiler; target: the kind of its cores, see `megakernel.target`.
    chips: along each axis of the network.
    cores: JAX devices.
    """

    name: str
    target: str
    chips: tuple[int, ...]
    cores: int

    @property
    def one_chip(self) -> bool:
        return max(self.chips) == 1


TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("v5e:1x1", "v5e", (1, 1), cores=1),
        Topology("v5e:2x2", "v5e", (2, 2), cores=4),
        Topology("v5p:1x1x1", "v5p", (1, 1, 1), cores=1),  # the two cores of a v5p are one device
        Topology("v5p:2x2x1", "v5p", (2, 2, 1), cores=4),
        Topology("v6e:1x1", "v6e", (1, 1), cores=1),
        Topology("v6e:2x2", "v6e", (2, 2), cores=4),
        Topology("tpu7x:1x1x1", "v7x", (1, 1, 1), cores=2),
        Topology("tpu7x:2x2x1", "v7x", (2, 2, 1), cores=8),
        Topology("tpu7x:4x4x1", "v7x", (4, 4, 1), cores=32),
    )
}


def find_machine(name: str, cores: int | None) -> tuple[Target, int]:
    """The kind of core and how many: of a target (one by default) or of a topology (all of them by default).

    Raises:
      TopologyError: the topology has fewer cores.
      ValueError: the name is neither.
    """
    if name in TOPOLOGIES:
        topology = TOPOLOGIES[name]
        if cores is not None and cores > topology.cores:
            raise TopologyError(f"cores = {cores}; {name} has {topology.cores}")
        return find_target(topology.target), topology.cores if cores is None else cores
    if name not in TARGETS:
        raise ValueError(f"target {name!r} is not known; known: {', '.join([*TARGETS, *TOPOLOGIES])}")
    return find_target(name), 1 if cores is None else cores


def smallest_topology(target: Target, cores: int) -> Topology:
    """The smallest machine of a kind with at least so many cores.

    Raises:
      TopologyError: the target has no compiler, or no known machine is large enough.
    """
    found = sorted((t for t in TOPOLOGIES.values() if t.target == target.name), key=lambda t: t.cores)
    if not found:
        kinds = dict.fromkeys(topology.target for topology in TOPOLOGIES.values())
        raise TopologyError(f"target {target.name!r} has no ahead-of-time compiler; choose one of {', '.join(kinds)}")
    for topology in found:
        if topology.cores >= cores:
            return topology
    raise TopologyError(f"cores = {cores}; the largest known machine of {target.name} has {found[-1].cores}")
