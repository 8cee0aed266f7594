"""Routed experts: each distinct one is decoded once and serves every row that chose it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.bank import down_scales, mxfp4_rows
from megakernel.control import when
from megakernel.phases.ffn import activation
from megakernel.phases.linear import dot, rounded
from megakernel.phases.mxfp4 import mxfp4_dot
from megakernel.plan import Plan
from megakernel.stream import Experts, Ref, Scalar


def run_experts(
    plan: Plan, count: Scalar, moe_layer: Scalar, weights: Ref, x: Ref, experts: Experts, chosen: Ref, total: Ref
) -> None:
    """Sums the chosen experts' outputs, in ascending order of expert, so that a row's sum ignores its neighbours.

    Args:
      count: distinct experts listed in `chosen`.
      weights: [rows, lanes] f32, zero where a row did not choose the expert.
      x: [rows, latent] in the activation format.
      total: [rows, latent lanes] f32, receives the weighted sum in its first `plan.expert_rows` rows, the rest zero.
    """
    rows = plan.expert_rows
    total[...] = jnp.zeros(total.shape, jnp.float32)

    def one(order: Scalar, _: None) -> None:
        expert = chosen[order]
        gate_up, down = experts.take(order, moe_layer, expert)
        y = expert_output(plan, x[:rows], gate_up[...], down[...])
        if plan.max_distinct_experts > plan.expert_slots:
            _start_ahead(plan, order + plan.expert_slots, count, moe_layer, experts, chosen)
        lane = lax.broadcasted_iota(jnp.int32, (rows, weights.shape[1]), 1)
        share = jnp.sum(jnp.where(lane == expert, weights[:rows], 0.0), axis=-1, keepdims=True)  # [rows, 1]
        total[:rows] += jnp.where(share > 0.0, share * y, 0.0)

    lax.fori_loop(0, count, one, None)


def _start_ahead(plan: Plan, order: Scalar, count: Scalar, moe_layer: Scalar, experts: Experts, chosen: Ref) -> None:
    """The slot just read takes the expert that comes a whole set of slots later, if there is one."""

    @when(order < count)
    def start() -> None:
        experts.start(order, moe_layer, chosen[order])


def expert_output(plan: Plan, x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """`W2 act(W1 x, W3 x)` of one expert.  # x [rows, latent] -> [rows, latent lanes] f32"""
    config = plan.config
    inner = plan.split.expert_width
    if config.expert_format == "bf16":
        both = rounded(plan, dot(plan, x, gate_up))
        return rounded(plan, dot(plan, _hidden(plan, both).astype(x.dtype), down))
    code_rows, scale_rows = mxfp4_rows(config.routed_expert_hidden_size)
    both = rounded(plan, mxfp4_dot(plan, x, gate_up[:code_rows], gate_up[code_rows : code_rows + scale_rows]))
    scales = jnp.concatenate([gate_up[rows, lanes] for rows, lanes in down_scales(plan.split)], axis=1)
    return rounded(plan, mxfp4_dot(plan, _hidden(plan, both).astype(x.dtype), down[: mxfp4_rows(inner)[0]], scales))


def _hidden(plan: Plan, both: jax.Array) -> jax.Array:
    """# [rows, gate and up and padding] f32 -> [rows, inner] f32"""
    inner = plan.split.expert_width
    return activation(plan, both[:, :inner], both[:, inner : 2 * inner])
