"""Sums whose bits this file fixes.

Compilers choose the order of a reduction by the shape of the whole array, and whether to contract a product with an
addition by what stands around them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def addend(factor: jax.Array, values: jax.Array) -> jax.Array:
    """`factor * values`, rounded before it is added to anything, and NaN where it is not finite.

    What has been looked at, XLA's CPU backend does not contract with the addition that follows.
    """
    product = factor * values
    return jnp.where(jnp.abs(product) < jnp.inf, product, jnp.nan)


def sum_over_keys(x: jax.Array) -> jax.Array:
    """Sum over the middle axis by halves, then one by one.  # [sequences, key, value] f32 -> [sequences, value] f32"""
    while x.shape[1] > 8 and x.shape[1] % 2 == 0:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    total = x[:, 0]
    for key in range(1, x.shape[1]):
        total = total + x[:, key]
    return total
