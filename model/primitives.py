"""Operations that every part of the model shares: linear maps, norms, gated activations.

Rounding follows the dtype of the activations. With float32 nothing is rounded. With bfloat16 a result is rounded
exactly where the official code rounds it, and sums run in float32 (`HIGHEST` keeps float32 products exact on
devices whose default is a shorter format).
Source of the maths: the modelling code and technical report of Kimi K3 and Kimi Linear (Moonshot AI).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

Weight = jax.Array | nnx.Param
Trace = dict[str, list[jax.Array]]
"""Intermediate values by name, one entry for each time the name is passed in execution order."""

HIGHEST = lax.Precision.HIGHEST


def record(trace: Trace | None, name: str, value: jax.Array) -> None:
    if trace is not None:
        trace.setdefault(name, []).append(value)


def linear(x: jax.Array, weight: Weight) -> jax.Array:
    """`x [..., in]` times `weight [out, in]`: float32 sums, one rounding to the dtype of `x`; `[..., out]`."""
    return lax.dot_general(x, weight[...], (((x.ndim - 1,), (1,)), ((), ())), precision=HIGHEST)


def linear_f32(x: jax.Array, weight: Weight) -> jax.Array:
    """As `linear`, but the float32 sum is kept: for router scores and logits, which decide discrete outcomes."""
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight[...], dimensions, precision=HIGHEST, preferred_element_type=jnp.float32)


def einsum_f32(equation: str, *operands: Any) -> jax.Array:
    """Einsum with float32 sums and a float32 result."""
    return jnp.einsum(equation, *operands, precision=HIGHEST, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, weight: Weight, eps: float) -> jax.Array:
    """`x [..., d] / rms(x) * weight [d]`, in the dtype of `x`; rounded before and after the weight, as officially."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight[...].astype(x.dtype)


def l2_norm(x: jax.Array) -> jax.Array:
    """`x [..., d] / |x|` in float32; the 1e-6 joins the sum of squares, not their mean."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)


def situ_glu(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float) -> jax.Array:
    """SiTU: `[beta tanh(g / beta) sigmoid(g)] [lambda tanh(u / lambda)]` in float32, rounded once.

    The sigmoid sees the raw gate, not the soft-clipped one.
    """
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    clipped = beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g)
    return (clipped * linear_beta * jnp.tanh(u / linear_beta)).astype(gate.dtype)


def swi_glu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up` in float32, rounded once."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
