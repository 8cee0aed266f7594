"""Residual stream: attention-residual mixing and RMS normalisation.

Attention residuals ("Attention Residuals", Moonshot 2026; Kimi K3 report): a sublayer reads a softmax mixture of the
snapshots of the prefix sum and the prefix sum itself, scored by one learned vector.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.phases.linear import rounded
from megakernel.plan import Plan
from megakernel.stream import Ref, Scalar


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis, float32, unrounded."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def mix(plan: Plan, stream: Ref, count: Scalar, weight: jax.Array) -> jax.Array:
    """The mixture of the first `count` snapshots and the prefix; with no snapshot, the prefix.

    Args:
      stream: [snapshots + 1, rows, hidden] f32, the prefix last; snapshots from `count` on may hold anything.
      weight: [1, hidden] f32, the norm weight times the projection row.
    """
    last = stream.shape[0] - 1
    if not plan.config.attn_res_block_size:
        return stream[last]
    number = lax.broadcasted_iota(jnp.int32, (last + 1, 1, 1), 0)
    present = (number < count) | (number == last)
    entries = jnp.where(present, stream[...], 0.0)  # [snapshots + 1, rows, hidden]
    spread = lax.rsqrt(jnp.mean(entries * entries, axis=-1, keepdims=True) + plan.config.rms_norm_eps)
    scores = jnp.sum(entries * weight[None], axis=-1, keepdims=True) * spread
    scores = jnp.where(present, scores, -jnp.inf)  # [snapshots + 1, rows, 1]
    shares = jnp.exp(scores - jnp.max(scores, axis=0, keepdims=True))
    total, mixture = shares[0], shares[0] * entries[0]
    for i in range(1, last + 1):
        total, mixture = total + shares[i], mixture + shares[i] * entries[i]
    return rounded(plan, mixture / total)
