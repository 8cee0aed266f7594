"""From logits to the next token: greedy or temperature / min-p / top-k / top-p, by the Gumbel-max trick.

Order of the filters: logits are divided by the temperature; min-p drops entries less likely than `min_p` times the
likeliest; top-k keeps the k likeliest of what is left; top-p keeps the smallest set of the likeliest whose probability
within what is left reaches p. Equal logits rank by lowest index. Adding Gumbel noise and taking the maximum then draws
from the softmax of what is kept (Gumbel 1954; Maddison et al., arXiv 1411.0030).

Ranks are never sorted: a threshold is found by bisection on the bits of the float, and ties on it by bisection on the
index, so every pass is a masked sum over the vocabulary. Rows are sampled one by one, in an array of one row, so that a
row's sums do not depend on its neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.control import when, when_at
from megakernel.phases.random import gumbel, threefry2x32
from megakernel.plan import Plan
from megakernel.stream import Ref, Scalar

TEMPERATURE, TOP_P, MIN_P = range(3)
"""Lanes of the `sampling_floats` request."""
TOP_K, SEED_LOW, SEED_HIGH = range(3)
"""Lanes of the `sampling_ints` request."""
_LOWEST_KEY = -(2**31)


@dataclasses.dataclass(frozen=True)
class RowSampling:
    """What one sequence asked for; all scalars. Temperature 0 is greedy, top_k 0 keeps all."""

    temperature: Scalar
    top_p: Scalar
    min_p: Scalar
    top_k: Scalar
    seed: tuple[Scalar, Scalar]

    @classmethod
    def of(cls, floats: Ref, ints: Ref, sequence: Scalar | int) -> RowSampling:
        """Reads the requests of one sequence from SMEM."""
        seed = tuple(ints[sequence, lane].astype(jnp.uint32) for lane in (SEED_LOW, SEED_HIGH))
        temperature, top_p, min_p = (floats[sequence, lane] for lane in (TEMPERATURE, TOP_P, MIN_P))
        return cls(temperature, top_p, min_p, ints[sequence, TOP_K], seed)


def choose_token(logits: jax.Array, scratch: Ref, sampling: RowSampling, position: Scalar) -> Scalar:
    """The next token of one row.

    Args:
      logits: [1, lanes] f32 from `masked_logits`; scratch: the same shape, overwritten.
      position: that the new token will have in its sequence.
    Returns:
      [] i32
    """
    scratch[...] = logits

    @when_at(sampling.temperature > 0.0, position)
    def draw(position: Scalar) -> None:
        scratch[...] = scratch[...] / sampling.temperature
        _filter(scratch, sampling)
        scratch[...] += _noise(sampling, position, scratch.shape)

    return argmax(scratch[...])


def masked_logits(plan: Plan, logits: jax.Array) -> jax.Array:
    """-inf past the vocabulary.  # [1, lanes] f32"""
    lane = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(lane < plan.config.vocab_size, logits, -jnp.inf)


def argmax(x: jax.Array) -> Scalar:
    """Lowest index of the maximum.  # [1, n] -> [] i32"""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.min(jnp.where(x == jnp.max(x), lane, x.shape[1] - 1))


def log_probability(logits: jax.Array, token: Scalar) -> Scalar:
    """log softmax of the raw logits at `token`.  # logits [1, lanes] f32 from `masked_logits` -> [] f32"""
    lane = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    highest = jnp.max(logits)
    total = jnp.sum(jnp.exp(logits - highest), axis=-1, keepdims=True)
    at_token = jnp.sum(jnp.where(lane == token, logits, 0.0), axis=-1, keepdims=True)
    return jnp.max(at_token - highest - jnp.log(total))


def _noise(sampling: RowSampling, position: Scalar, shape: tuple[int, ...]) -> jax.Array:
    entry = lax.broadcasted_iota(jnp.int32, shape, 1).astype(jnp.uint32)
    bits, _ = threefry2x32(sampling.seed, (jnp.full(shape, position, jnp.int32).astype(jnp.uint32), entry))
    return gumbel(bits)


def _filter(scaled: Ref, sampling: RowSampling) -> None:
    """Sets what min-p, top-k and top-p drop to -inf, in that order; a filter runs only if it is asked for."""

    @when(sampling.min_p > 0.0)
    def drop_unlikely() -> None:
        x = scaled[...]
        scaled[...] = jnp.where(jnp.exp(x - jnp.max(x)) < sampling.min_p, -jnp.inf, x)

    @when(sampling.top_k > 0)
    def keep_likeliest() -> None:
        x = scaled[...]
        quota = jnp.full((1, 1), sampling.top_k, jnp.int32).astype(jnp.float32)
        scaled[...] = jnp.where(_within_quota(x, jnp.ones(x.shape, jnp.float32), quota), x, -jnp.inf)

    @when(sampling.top_p < 1.0)
    def keep_nucleus() -> None:
        x = scaled[...]
        mass = jnp.exp(x - jnp.max(x))
        quota = sampling.top_p * jnp.sum(mass, axis=-1, keepdims=True)
        scaled[...] = jnp.where(_within_quota(x, mass, quota), x, -jnp.inf)


def _within_quota(x: jax.Array, mass: jax.Array, quota: jax.Array) -> jax.Array:
    """Entries such that the mass of all entries ranked before them is below the quota.

    Rank: larger x first, then lower index. All [1, n] f32, quota [1, 1] f32.
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
    """int32 keys in the order of the floats; equal floats, so also -0 and +0, have equal keys.  # f32 -> i32"""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, -(bits & jnp.int32(0x7FFFFFFF)), bits)
