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


def mix(plan: Plan, snapshots: Ref, count: Scalar, prefix: jax.Array, weight: jax.Array) -> jax.Array:
    """The mixture of the first `count` snapshots and the prefix; with no snapshot, the prefix.

    Args:
      snapshots: [snapshots, rows, hidden] f32; entries from `count` on may hold anything.
      prefix: [rows, hidden] f32.
      weight: [1, hidden] f32, the norm weight times the projection row.
    """
    if not plan.config.attn_res_block_size:
        return prefix
    entries, scores = [], []
    for i in range(plan.config.num_snapshots):
        present = i < count
        entry = jnp.where(present, snapshots[i], 0.0)
        entries.append(entry)
        scores.append(jnp.where(present, _score(plan, entry, weight), -jnp.inf))
    entries.append(prefix)
    scores.append(_score(plan, prefix, weight))

    highest = scores[0]
    for score in scores[1:]:
        highest = jnp.maximum(highest, score)
    shares = [jnp.exp(score - highest) for score in scores]
    total = sum(shares[1:], start=shares[0])
    mixture = sum((share / total * entry for share, entry in zip(shares, entries, strict=True)), start=jnp.float32(0))
    return rounded(plan, mixture)


def _score(plan: Plan, entry: jax.Array, weight: jax.Array) -> jax.Array:
    """[rows, 1] f32"""
    spread = lax.rsqrt(jnp.mean(entry * entry, axis=-1, keepdims=True) + plan.config.rms_norm_eps)
    return jnp.sum(entry * weight, axis=-1, keepdims=True) * spread
