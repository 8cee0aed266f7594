"""Counter-based noise: Threefry-2x32 with 20 rounds (Salmon et al., SC 2011), the generator behind `jax.random`.

A number depends on the sequence's seed, the position of the token and the vocabulary entry, and on nothing else: not
on the batch, the slot or how many tokens a launch makes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two u32 of noise for each counter; all arrays broadcast against each other."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def gumbel(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise from 24 of the bits: -log(-log(1 - v)) with v in (0, 1).  # u32 -> f32

    The largest values, which decide, come from small v, where float32 is finest. The largest v would round to 1 and
    its noise be -inf: the only token that a filter keeps would be as unlikely as those that it drops.
    """
    v = ((bits >> 8).astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-24
    v = jnp.minimum(v, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-v))
