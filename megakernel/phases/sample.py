"""From logits to the next token: greedy or temperature / min-p / top-k / top-p, by the Gumbel-max trick.

Order of the filters: logits are divided by the temperature; min-p drops entries less likely than `min_p` times the
likeliest; top-k keeps the k likeliest of what is left; top-p keeps the smallest set of the likeliest whose probability
within what is left reaches p. Equal logits rank by lowest index. Adding Gumbel noise and taking the maximum then draws
from the softmax of what is kept (Gumbel 1954; Maddison et al., arXiv 1411.0030).

Ranks are never sorted: a threshold is found by bisection on the bits of the float, and ties on it by bisection on the
index, so every pass is a masked sum over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.control import when
from megakernel.phases.random import gumbel, threefry2x32
from megakernel.plan import Plan
from megakernel.stream import Ref

TEMPERATURE, TOP_P, MIN_P = range(3)
"""Lanes of the `sampling_floats` request."""
TOP_K, SEED_LOW, SEED_HIGH = range(3)
"""Lanes of the `sampling_ints` request."""
_LOWEST_KEY = -(2**31)


def choose_tokens(
    plan: Plan, logits: Ref, scratch: Ref, floats: jax.Array, ints: jax.Array, positions: jax.Array
) -> jax.Array:
    """The next token of every row.

    Args:
      logits: [rows, lanes] f32, vocabulary first; scratch: the same shape, overwritten.
      floats, ints: [rows, 128], see the lane names above; temperature 0 is greedy; top_k 0 keeps all.
      positions: [rows, 1] i32, position that the new token will have in its sequence.
    Returns:
      [rows, 1] i32
    """
    scratch[...] = masked_logits(plan, logits)
    temperature = floats[:, TEMPERATURE : TEMPERATURE + 1]
    sampled = temperature > 0.0

    @when(jnp.max(temperature) > 0.0)
    def draw() -> None:
        scaled = jnp.where(sampled, scratch[...] / jnp.where(sampled, temperature, 1.0), scratch[...])
        scratch[...] = scaled
        _filter(scratch, floats, ints)
        scratch[...] += jnp.where(sampled, _noise(plan, ints, positions, scratch.shape), 0.0)

    return argmax(scratch[...])


def masked_logits(plan: Plan, logits: Ref) -> jax.Array:
    lane = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(lane < plan.config.vocab_size, logits[...], -jnp.inf)


def argmax(x: jax.Array) -> jax.Array:
    """Lowest index of the maximum.  # [rows, n] -> [rows, 1] i32"""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    best = jnp.max(x, axis=-1, keepdims=True)
    return jnp.min(jnp.where(x == best, lane, x.shape[1]), axis=-1, keepdims=True)


def log_probability(plan: Plan, logits: Ref, tokens: jax.Array) -> jax.Array:
    """log softmax of the raw logits at `tokens`.  # tokens [rows, 1] i32 -> [rows, 1] f32"""
    x = masked_logits(plan, logits)
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    highest = jnp.max(x, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(x - highest), axis=-1, keepdims=True)
    at_token = jnp.sum(jnp.where(lane == tokens, x, 0.0), axis=-1, keepdims=True)
    return at_token - highest - jnp.log(total)


def _noise(plan: Plan, ints: jax.Array, positions: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    low, high = (ints[:, lane : lane + 1].astype(jnp.uint32) for lane in (SEED_LOW, SEED_HIGH))
    entry = lax.broadcasted_iota(jnp.int32, shape, 1).astype(jnp.uint32)
    position = jnp.broadcast_to(positions, shape).astype(jnp.uint32)
    bits, _ = threefry2x32((low, high), (position, entry))
    return gumbel(bits)


def _filter(scaled: Ref, floats: jax.Array, ints: jax.Array) -> None:
    """Sets what min-p, top-k and top-p drop to -inf, in that order; each filter runs only if some row asks for it."""
    min_p, top_p = floats[:, MIN_P : MIN_P + 1], floats[:, TOP_P : TOP_P + 1]
    top_k = ints[:, TOP_K : TOP_K + 1]

    @when(jnp.max(min_p) > 0.0)
    def drop_unlikely() -> None:
        x = scaled[...]
        unlikely = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True)) < min_p
        scaled[...] = jnp.where(unlikely, -jnp.inf, x)

    @when(jnp.max(top_k) > 0)
    def keep_likeliest() -> None:
        x = scaled[...]
        quota = jnp.where(top_k > 0, top_k, x.shape[1]).astype(jnp.float32)
        scaled[...] = jnp.where(_within_quota(x, jnp.ones(x.shape, jnp.float32), quota), x, -jnp.inf)

    @when(jnp.min(top_p) < 1.0)
    def keep_nucleus() -> None:
        x = scaled[...]
        mass = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
        quota = jnp.where(top_p < 1.0, top_p * jnp.sum(mass, axis=-1, keepdims=True), jnp.inf)
        scaled[...] = jnp.where(_within_quota(x, mass, quota), x, -jnp.inf)


def _within_quota(x: jax.Array, mass: jax.Array, quota: jax.Array) -> jax.Array:
    """Entries such that the mass of all entries ranked before them is below the quota.

    Rank: larger x first, then lower index. All [rows, n] f32, quota [rows, 1] f32.
    """
    key = sortable(x)

    def mass_where(condition: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(condition, mass, 0.0), axis=-1, keepdims=True)

    # The lowest threshold whose strictly larger entries weigh less than the quota: everything above it is in.
    threshold = _bisect(jnp.full(quota.shape, _LOWEST_KEY, jnp.int32), 32, lambda t: mass_where(key > t) >= quota)
    above, ties = key > threshold, key == threshold
    room = quota - mass_where(above)
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    bits = max(1, (x.shape[1] - 1).bit_length())
    last = _bisect(jnp.zeros(quota.shape, jnp.int32), bits, lambda i: mass_where(ties & (lane <= i)) < room)
    return above | (ties & (lane <= last))


def _bisect(start: jax.Array, bits: int, too_low: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Smallest integer from `start` on, within 2**bits, for which the monotone `too_low` is false; else the last."""

    def step(i: jax.Array, low: jax.Array) -> jax.Array:
        width = lax.shift_left(jnp.int32(1), jnp.int32(bits - 1) - i)
        middle = low + (width - 1)
        return jnp.where(too_low(middle), low + width, low)

    return lax.fori_loop(0, bits, step, start)


def sortable(x: jax.Array) -> jax.Array:
    """int32 keys in the order of the floats (-0 below +0).  # f32 -> i32"""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
