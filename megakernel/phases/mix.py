"""Residual stream: attention-residual mixing and RMS normalisation.

Attention residuals ("Attention Residuals", Moonshot 2026; Kimi K3 report): a sublayer reads a softmax mixture of the
snapshots of the prefix sum and the prefix sum itself, scored by one learned vector.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.phases.linear import rounded
from megakernel.plan import Plan
from megakernel.stream import Ref, Scalar

_PIECE_LANES = 1024


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis, float32, unrounded."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def mix(plan: Plan, stream: Ref, count: Scalar, weight: jax.Array) -> jax.Array:
    """The mixture of the first `count` snapshots and the prefix; with no snapshot, the prefix.

    Args:
      stream: [snapshots + 1, rows, hidden] f32, the prefix last; snapshots from `count` on hold any finite numbers.
      weight: [1, hidden] f32, the norm weight times the projection row.
    """
    last = stream.shape[0] - 1
    if not plan.config.attn_res_block_size:
        return stream[last]
    scores = [_score(plan, stream, entry, weight) for entry in range(last + 1)]  # [rows, 1] each
    scores = [jnp.where(entry < count, score, -jnp.inf) for entry, score in enumerate(scores[:-1])] + scores[-1:]
    highest = functools.reduce(jnp.maximum, scores)
    shares = [jnp.exp(score - highest) for score in scores]
    total = functools.reduce(jnp.add, shares)
    return jnp.concatenate([_mixture(plan, stream, shares, total, lanes) for lanes in _pieces(stream)], axis=1)


def _score(plan: Plan, stream: Ref, entry: int, weight: jax.Array) -> jax.Array:
    """How well one entry, normalised, agrees with the learned vector.  # [rows, 1] f32"""
    squares, products = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for lanes in _pieces(stream):
        values = stream[entry, :, lanes]  # [rows, piece]
        squares = squares + values * values
        products = products + values * weight[:, lanes]
    mean = jnp.sum(squares, axis=-1, keepdims=True) / stream.shape[2]
    return jnp.sum(products, axis=-1, keepdims=True) * lax.rsqrt(mean + plan.config.rms_norm_eps)


def _mixture(plan: Plan, stream: Ref, shares: list[jax.Array], total: jax.Array, lanes: slice) -> jax.Array:
    mixture = shares[0] * stream[0, :, lanes]
    for entry in range(1, len(shares)):
        mixture = mixture + shares[entry] * stream[entry, :, lanes]
    return rounded(plan, mixture / total)


def _pieces(stream: Ref) -> list[slice]:
    """Lanes of the residual stream in pieces that stay in registers."""
    hidden = stream.shape[2]
    width = _PIECE_LANES if hidden % _PIECE_LANES == 0 else hidden
    return [slice(start, start + width) for start in range(0, hidden, width)]
