"""Which experts each row takes, and with what weight (DeepSeek-V3's bias-corrected sigmoid routing, arXiv 2412.19437).

Selection is exact: float32 scores, ties to the lowest expert.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.plan import Plan
from megakernel.stream import Experts, Ref, Scalar


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
    plan: Plan, weights: jax.Array, moe_layer: Scalar, first: Scalar | int, experts: Experts, chosen: Ref
) -> Scalar:
    """Lists the distinct experts in ascending order and starts fetching each as soon as it is known.

    Only experts from `first` on are listed, as many as a core holds.

    An expert that only has zero weights adds nothing, so "chosen" is "has a weight above zero somewhere".

    Args:
      chosen: [max distinct experts] i32 (SMEM), receives the list.
    Returns:
      how many there are.
    """
    wanted = jnp.max(weights, axis=0, keepdims=True) > 0.0  # [1, lanes]
    lane = lax.broadcasted_iota(jnp.int32, wanted.shape, 1)
    if plan.split.expert_groups > 1:
        wanted = wanted & (lane >= first) & (lane < first + plan.split.experts)
    count = jnp.sum(wanted.astype(jnp.int32))

    def find(order: Scalar, previous: Scalar) -> Scalar:
        expert = jnp.min(jnp.where(wanted & (lane > previous), lane, wanted.shape[1]))
        chosen[order] = expert
        return expert

    def find_and_start(order: Scalar, previous: Scalar) -> Scalar:
        expert = find(order, previous)
        experts.start(order, moe_layer, expert)
        return expert

    started = jnp.minimum(count, plan.expert_slots)
    last = lax.fori_loop(0, started, find_and_start, jnp.int32(-1))
    if plan.max_distinct_experts > plan.expert_slots:
        lax.fori_loop(started, count, find, last)
    return count
