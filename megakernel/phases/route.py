"""Which experts each row takes, and with what weight (DeepSeek-V3's bias-corrected sigmoid routing, arXiv 2412.19437).

Selection is exact: float32 scores, ties to the lowest expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.limits import MAX_ROWS
from megakernel.phases.visits import Counts, Visits
from megakernel.plan import Plan
from megakernel.stream import Experts, Scalar

_EXPERT_SHIFT = MAX_ROWS
"""Bits of a key below an expert's number: one for every tile of rows."""
_ONE = 0x3F800000
"""The bits of 1.0: keys above it are normal numbers in the order of their bits, for up to 16,383 experts."""


def expert_weights(plan: Plan, logits: jax.Array, bias: jax.Array, active: jax.Array) -> jax.Array:
    """The weight of every expert for every row, zero where it is not chosen.

    Args:
      logits: [rows, lanes] f32, experts first; bias: [1, experts] f32; active: [rows, 1] bool.
    Returns:
      [rows, lanes] f32; rows that are not active choose nothing.
    """
    config = plan.config
    lane = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    real = lane < config.num_experts
    scores = jax.nn.sigmoid(logits)
    padded_bias = jnp.pad(bias, ((0, 0), (0, logits.shape[1] - config.num_experts)))
    left = jnp.where(real, scores + padded_bias, -jnp.inf)
    chosen = jnp.zeros(logits.shape, jnp.bool_)
    for _ in range(config.num_experts_per_token):
        best = jnp.max(left, axis=-1, keepdims=True)
        first = jnp.min(jnp.where(left == best, lane, logits.shape[1]), axis=-1, keepdims=True)
        taken = lane == first
        chosen = chosen | taken
        left = jnp.where(taken, -jnp.inf, left)
    weights = jnp.where(chosen, scores, 0.0)
    if config.moe_renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return jnp.where(active & chosen, weights * config.routed_scaling_factor, 0.0)


def poison(plan: Plan, logits: jax.Array, bias: jax.Array) -> jax.Array:
    """NaN for rows whose scores are not all finite, else 0: a choice among NaN must not pass for a choice.

    Args:
      logits: [rows, >= experts] f32; bias: [1, experts] f32.
    Returns:
      [rows, 1] f32, to be added to what the experts give.
    """
    scores = logits[:, : plan.config.num_experts] + bias
    bad = jnp.sum(jnp.where(jnp.abs(scores) < jnp.inf, 0.0, 1.0), axis=-1, keepdims=True)
    return jnp.where(bad > 0.0, jnp.nan, 0.0)


def start_experts(
    plan: Plan, weights: jax.Array, moe_layer: Scalar, first: Scalar | int, experts: Experts, visits: Visits
) -> Counts:
    """Lists the distinct experts and their visits, and starts fetching each expert as soon as it is known.

    Only experts from `first` on are listed, as many as a core holds. While one is listed, the next one is found.

    An expert that only has zero weights adds nothing, so "chosen" is "has a weight above zero somewhere".
    """
    keys = _keys(plan, weights, first)
    count = jnp.sum((keys < jnp.inf).astype(jnp.int32))

    def note(order: Scalar, found: tuple[jax.Array, Scalar]) -> tuple[jax.Array, Scalar]:
        key, visited = found
        code = lax.bitcast_convert_type(key, jnp.int32)[0, 0]
        visits.experts[order] = (code - _ONE) >> _EXPERT_SHIFT
        return _lowest(keys, key), visits.list(order, code & (1 << _EXPERT_SHIFT) - 1, visited)

    def note_and_start(order: Scalar, found: tuple[jax.Array, Scalar]) -> tuple[jax.Array, Scalar]:
        found = note(order, found)
        experts.start(order, moe_layer, visits.experts[order])
        return found

    started = jnp.minimum(count, plan.expert_slots)
    found = lax.fori_loop(0, started, note_and_start, (_lowest(keys, jnp.zeros((1, 1), jnp.float32)), jnp.int32(0)))
    if plan.max_distinct_experts > plan.expert_slots:
        found = lax.fori_loop(started, count, note, found)
    return Counts(count, found[1])


def _lowest(keys: jax.Array, above: jax.Array) -> jax.Array:
    """# [1, lanes] f32, [1, 1] f32 -> [1, 1] f32"""
    return jnp.min(jnp.where(keys > above, keys, jnp.inf), axis=-1, keepdims=True)


def _keys(plan: Plan, weights: jax.Array, first: Scalar | int) -> jax.Array:
    """Number and tiles of every chosen expert of this core in one float32, ascending by number; else infinity.

    Float32, because a TPU finds the lowest of floats by one reduction, and that of integers by two.

    # weights [rows, lanes] f32 -> [1, lanes] f32
    """
    lane = lax.broadcasted_iota(jnp.int32, (1, weights.shape[1]), 1)
    if plan.expert_tiles == 1:
        tiles = jnp.max(jnp.where(weights > 0.0, 1, 0), axis=0, keepdims=True)
    else:
        row = lax.broadcasted_iota(jnp.int32, weights.shape, 0)
        tiles = jnp.sum(jnp.where(weights > 0.0, 1 << row, 0), axis=0, keepdims=True)
    wanted = tiles > 0
    if plan.split.expert_groups > 1:
        wanted = wanted & (lane >= first) & (lane < first + plan.split.experts)
    keys = lax.bitcast_convert_type(_ONE + (lane << _EXPERT_SHIFT | tiles), jnp.float32)
    return jnp.where(wanted, keys, jnp.inf)
