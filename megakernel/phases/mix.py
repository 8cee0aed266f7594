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
from megakernel.phases.sums import addend
from megakernel.plan import Plan
from megakernel.stream import Ref, Scalar

_PIECE_LANES = 1024


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis, float32, unrounded."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def mix_snapshots(plan: Plan, stream: Ref, count: Scalar, weight: jax.Array, mixture: Ref, shares: Ref) -> None:
    """Begins a mixture with the first `count` snapshots, which do not wait for the prefix; `mix_prefix` ends it.

    Args:
      stream: [snapshots + 1, rows, hidden] f32, the prefix last; snapshots from `count` on hold any finite numbers.
      weight: [1, hidden] f32, the norm weight times the projection row.
      mixture: [rows, hidden] f32, receives the sum of the snapshots, each times e to its score less the highest.
      shares: [2, rows, LANES] f32, receives the highest score, -inf without a snapshot, and the sum of the factors.
    """
    scores = [_score(plan, stream, entry, weight) for entry in range(stream.shape[0] - 1)]  # [rows, 1] each
    scores = [jnp.where(entry < count, score, -jnp.inf) for entry, score in enumerate(scores)]
    highest = functools.reduce(jnp.maximum, scores)
    factors = [jnp.where(entry < count, jnp.exp(score - highest), 0.0) for entry, score in enumerate(scores)]
    for lanes in _pieces(stream):
        parts = (addend(factor, stream[entry, :, lanes]) for entry, factor in enumerate(factors))
        mixture[:, lanes] = functools.reduce(jnp.add, parts)
    shares[0] = jnp.broadcast_to(highest, shares.shape[1:])
    shares[1] = jnp.broadcast_to(functools.reduce(jnp.add, factors), shares.shape[1:])


def mix_prefix(plan: Plan, stream: Ref, weight: jax.Array, mixture: Ref, shares: Ref) -> None:
    """Ends what `mix_snapshots` began with the same weight; with no snapshot, the mixture is the prefix.

    Leaves it in `mixture` with its RMS normalised to one, so that its reader only has to apply a norm's weight.
    """
    prefix = stream.shape[0] - 1
    score, highest = _score(plan, stream, prefix, weight), shares[0, :, :1]  # [rows, 1] each
    top = jnp.maximum(score, highest)
    factor, before = jnp.exp(score - top), jnp.exp(highest - top)
    total = factor + addend(before, shares[1, :, :1])
    squares = jnp.zeros((), jnp.float32)
    for lanes in _pieces(stream):
        mixed = addend(before, mixture[:, lanes]) + addend(factor, stream[prefix, :, lanes])
        mixed = rounded(plan, mixed / total)
        mixture[:, lanes] = mixed
        squares = squares + mixed * mixed
    scale = _rms_scale(plan, squares, stream.shape[2])
    for lanes in _pieces(stream):
        mixture[:, lanes] = mixture[:, lanes] * scale


def normalise_prefix(plan: Plan, stream: Ref, mixture: Ref) -> None:
    """What `mix_prefix` leaves where there is nothing to mix the prefix with."""
    prefix = stream[stream.shape[0] - 1]
    mixture[...] = prefix * _rms_scale(plan, prefix * prefix, stream.shape[2])


def _rms_scale(plan: Plan, squares: jax.Array, width: int) -> jax.Array:
    """# [rows, lanes] f32 -> [rows, 1] f32"""
    return lax.rsqrt(jnp.sum(squares, axis=-1, keepdims=True) / width + plan.config.rms_norm_eps)


def _score(plan: Plan, stream: Ref, entry: int, weight: jax.Array) -> jax.Array:
    """How well one entry, normalised, agrees with the learned vector.  # [rows, 1] f32"""
    squares, products = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for lanes in _pieces(stream):
        values = stream[entry, :, lanes]  # [rows, piece]
        squares = squares + values * values
        products = products + values * weight[:, lanes]
    return jnp.sum(products, axis=-1, keepdims=True) * _rms_scale(plan, squares, stream.shape[2])


def _pieces(stream: Ref) -> list[slice]:
    """Lanes of the residual stream in pieces that stay in registers."""
    hidden = stream.shape[2]
    width = _PIECE_LANES if hidden % _PIECE_LANES == 0 else hidden
    return [slice(start, start + width) for start in range(0, hidden, width)]
