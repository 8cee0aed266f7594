"""Sums whose order this file fixes: compilers choose the order of a reduction by the shape of the whole array."""

from __future__ import annotations

import jax


def sum_over_keys(x: jax.Array) -> jax.Array:
    """Sum over the middle axis by halves, then one by one.  # [sequences, key, value] f32 -> [sequences, value] f32"""
    while x.shape[1] > 8 and x.shape[1] % 2 == 0:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    total = x[:, 0]
    for key in range(1, x.shape[1]):
        total = total + x[:, key]
    return total
