"""Sums whose order this file fixes: compilers choose the order of a reduction by the shape of the whole array."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sum_over_keys(x: jax.Array) -> jax.Array:
    """Sum over the middle axis by halves.  # [sequences, key, value] f32 -> [sequences, value] f32"""
    while x.shape[1] > 8 and x.shape[1] % 2 == 0:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return jnp.sum(x, axis=1)
