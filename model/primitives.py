"""Operations that every part of the model shares: linear maps, norms, gated activations.

Rounding follows the dtype of the activations. With float32 nothing is rounded. With bfloat16 a result is rounded
exactly where the official code rounds it, and sums run in float32 (`HIGHEST` keeps float32 products exact on
devices whose default is a shorter format).
Source of the maths: the modelling code and technical report of Kimi K3 and Kimi Linear (Moonshot AI).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

Weight = jax.Array | nnx.Param
Trace = dict[str, list[jax.Array]]
"""Intermediate values by name, one entry for each time the name is passed in execution order."""

HIGHEST = lax.Precision.HIGHEST


def record(trace: Trace | None, name: str, value: jax.Array) -> None:
    if trace is not None:
        trace.setdefault(name, []).append(value)


def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` in `dtype`, rounded to nearest even for certain: XLA may drop a conversion that is followed by its inverse
    (`xla_allow_excess_precision`), but not this."""
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def linear(x: jax.Array, weight: Weight) -> jax.Array:
    """`x [..., in]` times `weight [out, in]`: float32 sums, one rounding to the dtype of `x`; `[..., out]`."""
    product = lax.dot_general(x, weight[...], (((x.ndim - 1,), (1,)), ((), ())), precision=HIGHEST)
    return rounded(product, x.dtype)


def linear_f32(x: jax.Array, weight: Weight) -> jax.Array:
    """As `linear`, but the float32 sum is kept: for router scores and logits, which decide discrete outcomes."""
    return einsum_f32("...i,oi->...o", x, weight[...])


def einsum_f32(equation: str, *operands: jax.Array) -> jax.Array:
    """Einsum with float32 products and sums and a float32 result, whatever the dtype of the operands."""
    return jnp.einsum(equation, *(operand.astype(jnp.float32) for operand in operands), precision=HIGHEST)


def rms_norm(x: jax.Array, weight: Weight, eps: float) -> jax.Array:
    """`x [..., d] / rms(x) * weight [d]`, in the dtype of `x`; rounded before and after the weight, as officially."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return rounded(rounded(normed, x.dtype) * weight[...].astype(x.dtype), x.dtype)


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
    return rounded(clipped * linear_beta * jnp.tanh(u / linear_beta), gate.dtype)


def swi_glu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up`, rounded after each of the two, as the code of Kimi Linear does."""
    return rounded(rounded(jax.nn.silu(gate.astype(jnp.float32)), gate.dtype) * up, gate.dtype)
