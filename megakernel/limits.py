"""What no plan can serve: refused with the numbers and the knob to turn, before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megakernel.program import LANES
from megakernel.report import place
from megakernel.target import MIB, Target
from model.config import ModelConfig

if TYPE_CHECKING:
    from megakernel.plan import Plan

POSITION_GROUP = 16
"""Cache positions (and embedding rows) that move together: one packed tile of any number format."""
MAX_ROWS = 16
VMEM_SHARE = 0.9
"""Part of VMEM that a plan may fill; the rest is the compiler's own scratch."""


class PlanError(ValueError):
    """A request that no plan can serve; the message has the numbers and the knob to turn."""


def check_request(
    config: ModelConfig,
    target: Target,
    sequences: int,
    tokens: int,
    context: int,
    page: int,
    ring_depth: int | None,
    expert_slots: int | None,
) -> None:
    """What can be told from the request alone."""
    counts = {"sequences": sequences, "context": context, "page": page}
    counts |= {"ring_depth": ring_depth or 2, "expert_slots": expert_slots or 1}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise PlanError(f"{name} = {count!r}; expected an integer")
    if not 1 <= sequences <= MAX_ROWS:
        advice = ": split the batch" if sequences > MAX_ROWS else ""
        raise PlanError(f"sequences = {sequences}; one step carries 1 to {MAX_ROWS} rows{advice}")
    if sequences * tokens > MAX_ROWS:
        fewer = MAX_ROWS // sequences - 1
        raise PlanError(
            f"{sequences} sequences with {tokens - 1} drafted tokens each need {sequences * tokens} rows, and a step "
            f"carries {MAX_ROWS}; {f'lower draft_tokens to {fewer}' if fewer else 'leave out the drafter'} or decode "
            "fewer together"
        )
    if not 1 <= context <= config.max_position_embeddings:
        raise PlanError(f"context = {context}; {config.name} has positions 1 to {config.max_position_embeddings}")
    if page % POSITION_GROUP or page <= 0:
        raise PlanError(f"page = {page}; expected a positive multiple of {POSITION_GROUP}")
    if ring_depth is not None and ring_depth < 2:
        raise PlanError(f"ring_depth = {ring_depth}; at least 2 blocks must be in flight")
    if expert_slots is not None and expert_slots < 1:
        raise PlanError(f"expert_slots = {expert_slots}; at least one expert must be in VMEM")
    if config.short_conv_kernel_size < 2:
        raise PlanError(f"short_conv_kernel_size = {config.short_conv_kernel_size}; the kernel needs at least 2")
    if target.lane_aligned:
        _check_lanes(config, target)


def _check_lanes(config: ModelConfig, target: Target) -> None:
    sizes = {
        "hidden_size": config.hidden_size,
        "linear_attn_config.head_dim": config.kda_head_dim,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "v_head_dim": config.v_head_dim,
        "kv_lora_rank": config.kv_lora_rank,
        "routed_expert_hidden_size": config.routed_expert_hidden_size,
    }
    for key, size in sizes.items():
        if size % LANES:
            raise PlanError(
                f"{key} = {size} is not a multiple of the {LANES} lanes of {target.name}; "
                "such a model runs on target 'cpu' only"
            )


_VMEM_KNOBS = ("ring_depth", "expert_slots", "page", "sequences")
_LOWEST = {"ring_depth": 2, "page": 128}
"""Knobs that nobody needs to lower further."""


def check_memory(plan: Plan) -> None:
    for memory, used, limit, knobs in (
        ("VMEM", plan.vmem_map, int(plan.target.vmem_bytes * VMEM_SHARE), _VMEM_KNOBS),
        ("SMEM", plan.smem_map, plan.target.smem_bytes // 2, ("launch_steps", "sequences")),
        ("HBM", plan.hbm_map, plan.target.hbm_bytes, ("context", "sequences")),
    ):
        total = sum(used.values())
        if total > limit:
            largest = max(used, key=lambda name: used[name])
            weights_alone = _weights_alone(plan, limit) if memory == "HBM" else ""
            raise PlanError(
                f"{plan.config.name} on {place(plan)} needs {total / MIB:,.1f} MiB of {memory}, "
                f"{limit / MIB:,.1f} MiB may be used (largest: {largest}, {used[largest] / MIB:,.1f} MiB); "
                f"{weights_alone or _knobs(plan, memory, knobs)}"
            )


def _weights_alone(plan: Plan, limit: int) -> str:
    """How many cores it takes at least where no other knob can help."""
    from megakernel.memory import weight_buffers

    weights = sum(buffer.padded_bytes for buffer in weight_buffers(plan).values())
    return (
        f"use more cores: the weights alone fill {-(-weights * plan.split.cores // limit)}" if weights > limit else ""
    )


def _knobs(plan: Plan, memory: str, knobs: Sequence[str]) -> str:
    given = {knob: getattr(plan, knob) for knob in knobs}
    lower = " or ".join(f"{knob} = {value}" for knob, value in given.items() if value > _LOWEST.get(knob, 1))
    return f"lower {lower}" + (f", or use more cores than {plan.split.cores}" if memory != "SMEM" else "")


def check_counters(plan: Plan) -> None:
    if plan.launch_steps < 1:
        raise PlanError(f"launch_steps = {plan.launch_steps}; expected 1 or more")
    if (plan.launch_steps + 1) * plan.tape_blocks >= 1 << 31:
        raise PlanError(
            f"launch_steps = {plan.launch_steps} of {plan.tape_blocks} blocks overflow the kernel's 32-bit counter; "
            "lower launch_steps"
        )
