"""How much travels between cores at a time, and in how many hops sums over cores go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megakernel.program import LANES, round_up
from megakernel.rates import rates_of

if TYPE_CHECKING:
    from megakernel.plan import Plan

EIGHT_BITS = ("int8", "float8_e4m3fn")
"""Formats of a wire that needs a scale a row."""
WIRE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
"""Formats of a wire, and the bytes that a number takes."""


def gather_lanes(plan: Plan) -> int:
    """Lanes of the widest piece that one core sends everyone."""
    split, config = plan.split, plan.config
    gathers = [[split.hidden]]
    if config.kda_layers:
        gathers.append([split.piece(config.kda_head_dim)] * (1 if config.use_full_rank_gate else 2))
    if config.mla_layers:
        gathers.append([split.piece(split.low_width)])
    if plan.moe_layers:
        beside = [split.piece(config.routed_expert_hidden_size)] if config.latent_experts else []
        gathers.append([exact_lanes(plan, split.piece(config.num_experts)), *beside])
        if config.latent_experts and config.num_shared_experts:
            gathers.append([split.shared_width])
    gathers += [[split.sum_piece(width)] for width in total_widths(plan)]
    if plan.drafter:
        gathers.append([plan.drafter.exchange_lanes(split)])
    return max(sum(round_up(width, LANES) for width in widths) for widths in gathers)


def exact_lanes(plan: Plan, width: int) -> int:
    """Lanes in which `width` float32 numbers keep all their bits."""
    return width if plan.activations == "float32" else 3 * width


def total_widths(plan: Plan) -> tuple[int, ...]:
    """Widths of the sums that every core needs whole."""
    config, widths = plan.config, [plan.config.hidden_size]
    if plan.moe_layers and config.latent_experts:
        widths.append(config.routed_expert_hidden_size)
    elif plan.moe_layers and config.num_shared_experts:
        widths.append(2 * config.hidden_size)
    drafts = plan.drafter.sum_widths if plan.drafter else ()
    return tuple(dict.fromkeys((*widths, *drafts)))


def hops_of_sums(plan: Plan) -> list[int]:
    """1, 2 or both: how its sums go."""
    return sorted({plan.hops(width) for width in total_widths(plan)})


def total_message(plan: Plan, width: int, hops: int) -> tuple[int, int]:
    """Rows and lanes of the partial sum, or the piece of one, that one core sends another."""
    scale = LANES if plan.wire in EIGHT_BITS else 0
    if hops == 2:
        return plan.wire_rows, plan.split.sum_piece(width) + scale
    return plan.wire_rows * (round_up(width, LANES) + scale) // LANES, LANES


def totals_inbox(plan: Plan, hops: int) -> tuple[int, int]:
    """Rows and lanes that hold any of those that go in `hops` hops."""
    return max(total_message(plan, width, hops) for width in total_widths(plan) if plan.hops(width) == hops)


def total_seconds(plan: Plan, width: int, hops: int, exchange: Callable[[float, int], float]) -> float:
    """What a sum over cores takes, from the first send to the last arrival.

    exchange: (bytes of a piece, cores) -> seconds, see `Rates.exchange`.
    """
    rows, lanes = total_message(plan, width, hops)
    seconds = exchange(rows * lanes * WIRE_BYTES[plan.wire], plan.split.cores)
    if hops == 2:
        own = plan.wire_rows * plan.split.sum_piece(width) * WIRE_BYTES[plan.activations]
        seconds += exchange(own, plan.split.cores)
    return seconds


def faster_in_one_hop(plan: Plan) -> frozenset[int]:
    """Widths of the sums whose exchanges are predicted to take less in one hop; none where nothing is known."""
    try:
        exchange = rates_of(plan.target).exchange
    except ValueError:
        return frozenset()
    one, two = ({w: total_seconds(plan, w, hops, exchange) for w in total_widths(plan)} for hops in (1, 2))
    return frozenset(width for width in one if one[width] < two[width])
