"""Routed experts: each distinct one is decoded once and serves every row that chose it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

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
      total: [rows, latent lanes] f32, receives the weighted sum.
    """
    total[...] = jnp.zeros(total.shape, jnp.float32)

    def one(order: Scalar, _: None) -> None:
        expert = chosen[order]
        gate_up, down = experts.take(order, moe_layer, expert)
        y = expert_output(plan, x[...], gate_up[...], down[...])
        ahead = order + plan.expert_slots

        @pl.when(ahead < count)
        def _() -> None:
            experts.start(ahead, moe_layer, chosen[ahead])

        lane = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
        share = jnp.sum(jnp.where(lane == expert, weights[...], 0.0), axis=-1, keepdims=True)  # [rows, 1]
        total[...] += jnp.where(share > 0.0, share * y, 0.0)

    lax.fori_loop(0, count, one, None)


def expert_output(plan: Plan, x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """`W2 act(W1 x, W3 x)` of one expert.  # x [rows, latent] -> [rows, latent lanes] f32"""
    config = plan.config
    width = round_up(config.moe_intermediate_size, LANES)
    both = rounded(plan, dot(x, _weights(plan, gate_up, config.routed_expert_hidden_size)))
    hidden = activation(plan, both[:, :width], both[:, width:])[:, : config.moe_intermediate_size]
    return rounded(plan, dot(hidden.astype(x.dtype), _weights(plan, down, config.moe_intermediate_size)))


def _weights(plan: Plan, packed: jax.Array, k: int) -> jax.Array:
    """One expert matrix as the matrix unit takes it.  # [k, lanes]"""
    if plan.config.expert_format == "bf16":
        return packed
    return decode_mxfp4(packed, k).astype(plan.weights)


def decode_mxfp4(packed: jax.Array, k: int) -> jax.Array:
    """OCP MXFP4 (E2M1 codes, E8M0 scales) to float32, exactly.

    Args:
      packed: [rows, lanes] u32: k / 8 rows of codes, nibble j of row r being input j * k / 8 + r, then rows of scales,
        byte b of row r being input group b * scale_rows + r.
    Returns:
      [k, lanes] f32
    """
    code_rows, scale_rows = mxfp4_rows(k)
    n = packed.shape[1]
    codes = _planes(packed[:code_rows], count=8, bits=4)  # [k, lanes]
    scales = _planes(packed[code_rows : code_rows + scale_rows], count=4, bits=8)[: k // _GROUP]
    scales = lax.bitcast_convert_type(scales << 23, jnp.float32)  # 2 ** (byte - 127)
    magnitude = codes & 7
    normal = lax.bitcast_convert_type((magnitude << 22) + jnp.uint32(126 << 23), jnp.float32)
    value = jnp.where(magnitude < 2, 0.5 * magnitude.astype(jnp.int32).astype(jnp.float32), normal)
    value = jnp.where(codes >= 8, -value, value)
    return (value.reshape(k // _GROUP, _GROUP, n) * scales[:, None, :]).reshape(k, n)


def _planes(words: jax.Array, count: int, bits: int) -> jax.Array:
    """[rows, lanes] u32 -> [count * rows, lanes] u32: the fields of each word, field by field."""
    rows, n = words.shape
    shift = jnp.uint32(bits) * lax.broadcasted_iota(jnp.uint32, (count, rows, n), 0)
    fields = (jnp.broadcast_to(words[None], (count, rows, n)) >> shift) & jnp.uint32((1 << bits) - 1)
    return fields.reshape(count * rows, n)
