"""Routed experts: each distinct one is decoded once and serves every row that chose it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.control import when
from megakernel.phases.ffn import activation
from megakernel.phases.linear import dot, rounded
from megakernel.plan import Plan, mxfp4_rows
from megakernel.program import LANES, round_up
from megakernel.stream import Experts, Ref, Scalar

_GROUP = 32


def run_experts(
    plan: Plan, count: Scalar, moe_layer: Scalar, weights: Ref, x: Ref, experts: Experts, chosen: Ref, total: Ref
) -> None:
    """Sums the chosen experts' outputs, in ascending order of expert, so that a row's sum ignores its neighbours.

    Args:
      count: distinct experts listed in `chosen`.
      weights: [rows, lanes] f32, zero where a row did not choose the expert.
      x: [rows, latent] in the activation format.
      total: [rows, latent lanes] f32, receives the weighted sum in its first `plan.product_rows` rows.
    """
    rows = plan.product_rows
    total[...] = jnp.zeros(total.shape, jnp.float32)

    def one(order: Scalar, _: None) -> None:
        expert = chosen[order]
        gate_up, down = experts.take(order, moe_layer, expert)
        y = expert_output(plan, x[:rows], gate_up[...], down[...])
        if plan.max_distinct_experts > plan.expert_slots:
            _start_ahead(plan, order + plan.expert_slots, count, moe_layer, experts, chosen)
        lane = lax.broadcasted_iota(jnp.int32, (rows, weights.shape[1]), 1)
        share = jnp.sum(jnp.where(lane == expert, weights[:rows], 0.0), axis=-1, keepdims=True)  # [product rows, 1]
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
    width = round_up(plan.split.expert_width, LANES)
    both = rounded(plan, dot(plan, x, _weights(plan, gate_up, config.routed_expert_hidden_size)))
    hidden = activation(plan, both[:, :width], both[:, width:])[:, : plan.split.expert_width]
    return rounded(plan, dot(plan, hidden.astype(x.dtype), _weights(plan, down, plan.split.expert_width)))


def _weights(plan: Plan, packed: jax.Array, k: int) -> jax.Array:
    """One expert matrix as the matrix unit takes it.  # [k, lanes]"""
    if plan.config.expert_format == "bf16":
        return packed
    decoded = decode_mxfp4(packed, k)
    return decoded if plan.target.multiplies_float32 else decoded.astype(jnp.bfloat16)


def decode_mxfp4(packed: jax.Array, k: int) -> jax.Array:
    """OCP MXFP4 (E2M1 codes, E8M0 scales) to float32, exactly.

    Args:
      packed: [rows, lanes] u32: k / 8 rows of codes, nibble j of row r being input j * k / 8 + r, then rows of scales,
        byte b of row r being input group b * scale_rows + r.
    Returns:
      [k, lanes] f32
    """
    code_rows, scale_rows = mxfp4_rows(k)
    words = lax.bitcast_convert_type(packed, jnp.int32)
    codes, exponents = words[:code_rows], words[code_rows : code_rows + scale_rows]
    doubled = jnp.concatenate([_doubled_value(codes >> shift) for shift in range(0, 32, 4)])  # [k, lanes]
    exponents = jnp.concatenate([(exponents >> shift) & 255 for shift in range(0, 32, 8)])[: k // _GROUP]
    scales = 0.5 * lax.bitcast_convert_type(exponents << 23, jnp.float32)  # 2 ** (byte - 127), halved
    return doubled * jnp.repeat(scales, _GROUP, axis=0)


def _doubled_value(words: jax.Array) -> jax.Array:
    """Twice the value of the E2M1 code in the low four bits.  # i32 -> f32, same shape

    The doubled magnitudes 0 1 2 3 4 6 8 12 of codes 0 to 7 are the upper envelope of three lines.
    """
    m = words & 7
    magnitude = jnp.maximum(jnp.maximum(m, 2 * m - 4), 4 * m - 16)
    return jnp.where((words & 8) > 0, -magnitude, magnitude).astype(jnp.float32)
