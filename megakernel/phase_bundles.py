"""The compiled schedule by phase: bundles of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megakernel.schedule_names import SUBLAYERS

if TYPE_CHECKING:
    from megakernel.schedule import Loop

DRAFTING = "drafting"
PHASES = ("between sublayers", *SUBLAYERS, "experts", "LM head", "sampling", "ends of a step", DRAFTING)
"""`between sublayers`: everything of a layer outside them; `MoE`: without the routed experts themselves; `ends of a
step`: embedding and acceptance; `drafting`: a drafter's proposal."""
BESIDE_DRAFTING = ("sampling", "ends of a step")
"""Phases whose compiled loops cannot be told from a drafter's."""


def phase_bundles(program: Loop) -> dict[str, float]:
    """Bundles of each phase in a step, loops counted as often as they turn. They add up to the round's.

    Args:
      program: with named loops, see `schedule.read_schedule`.
    """
    found = dict.fromkeys(PHASES, 0.0)
    round_ = next((loop for loop in program.inner if loop.name == "round"), None)
    if round_ is None:
        return {}
    found["ends of a step"] += round_.bundles
    for loop in round_.inner:
        if loop.name == "layer":
            _add_layer(found, loop)
        else:
            phase = {"product head": "LM head", "sampling": "sampling", "send": "sampling"}.get(loop.name)
            found[phase or "ends of a step"] += loop.turns * loop.executed
    return {name: bundles for name, bundles in found.items() if bundles}


def _add_layer(found: dict[str, float], layer: Loop) -> None:
    found["between sublayers"] += layer.turns * layer.bundles
    for loop in layer.inner:
        turns = layer.turns * loop.turns
        if loop.name not in SUBLAYERS:
            found["between sublayers"] += turns * loop.executed
            continue
        experts = sum(inner.turns * inner.executed for inner in loop.inner if inner.name in ("experts", "expert"))
        found["experts"] += turns * experts
        found[loop.name] += turns * (loop.executed - experts)
