"""From logits to the next token: greedy or temperature / min-p / top-k / top-p, by the Gumbel-max trick.

Order of the filters: logits are divided by the temperature; min-p drops entries less likely than `min_p` times the
likeliest; top-k keeps the k likeliest of what is left; top-p keeps the smallest set of the likeliest whose probability
within what is left reaches p. Equal logits rank by lowest index. Adding Gumbel noise and taking the maximum then draws
from the softmax of what is kept (Gumbel 1954; Maddison et al., arXiv 1411.0030).

Ranks are never sorted: a threshold is found by bisection on the bits of the float, and ties on it by bisection on the
index, so every pass is a masked sum over the vocabulary, in pieces (`megakernel.vocabulary`). Rows are sampled one by
one, in arrays of their own, so that a row's sums do not depend on its neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megakernel.control import when
from megakernel.phases.random import gumbel, threefry2x32
from megakernel.stream import Ref, Scalar
from megakernel.vocabulary import SEGMENTS, aligned, entries, for_pieces, highest, lowest_entry, tile_of, total

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


class Scratch(NamedTuple):
    """Two arrays of a row's shape, [segments, lanes] f32."""

    scaled: Ref
    mass: Ref


def load_logits(out: Ref, row: Scalar, logits: Ref, size: Scalar | int) -> Scalar:
    """Brings row `row` of a head's output into `logits`, -inf past the vocabulary.

    Args:
      out: [rows, at least segments * lanes] f32; logits: [segments, lanes] f32, overwritten; size: of the vocabulary.
    Returns:
      how many logits are NaN or infinite.  # [] f32
    """
    segments, lanes = logits.shape

    def bring(columns: Any) -> jax.Array:
        for segment in range(segments):
            at = aligned(segment * lanes + columns.start, columns.size)
            logits[segment : segment + 1, columns] = out[pl.ds(row, 1), at]
        return _drop_padding(logits, columns, size)

    return jnp.max(total(logits.shape, bring))


def load_shards(pieces: Ref, logits: Ref, size: int) -> jax.Array:
    """As `load_logits`, from the shards of all cores.  # pieces [cores, SEGMENTS, lanes] f32"""
    segments, lanes = logits.shape
    cores = segments // SEGMENTS
    for core in range(cores):
        logits[core * SEGMENTS : (core + 1) * SEGMENTS] = pieces[core, :, :lanes]

    return jnp.max(total(logits.shape, lambda columns: _drop_padding(logits, columns, size)))


def _drop_padding(logits: Ref, columns: Any, size: Scalar | int) -> jax.Array:
    """-inf past the vocabulary; 1 where a logit is NaN or infinite, else 0.  # [segments, columns] f32"""
    x, exists = logits[:, columns], entries(logits.shape, columns) < size
    logits[:, columns] = jnp.where(exists, x, -jnp.inf)
    return jnp.where(exists & jnp.logical_not(jnp.abs(x) < jnp.inf), 1.0, 0.0)


def choose_token(logits: Ref, scratch: Scratch, sampling: RowSampling, position: Scalar) -> Scalar:
    """The next token of one row.

    Args:
      logits: [segments, lanes] f32 from `load_logits`; scratch: overwritten if the token is drawn.
      position: that the new token will have in its sequence.
    Returns:
      [] i32
    """

    def draw(position: Scalar) -> Scalar:
        shape, scaled = logits.shape, scratch.scaled

        def scale(columns: Any) -> jax.Array:
            x = logits[:, columns] / sampling.temperature
            scaled[:, columns] = x
            return x

        def disturb(columns: Any, _: None) -> None:
            scaled[:, columns] += noise(sampling, position, entries(shape, columns))

        _filter(scratch, highest(shape, scale), sampling)
        for_pieces(shape, disturb)
        return argmax(scaled)

    drawn = (sampling.temperature > 0.0).astype(jnp.int32)
    return lax.fori_loop(0, drawn, lambda turn, _: draw(position + turn), argmax(logits))


def argmax(x: Ref) -> Scalar:
    """Lowest entry of the maximum.  # [segments, lanes] f32 -> [] i32"""
    best = highest(x.shape, lambda columns: x[:, columns])
    return lowest_entry(x.shape, lambda columns: x[:, columns] == best)


def log_probability(logits: Ref, token: Scalar) -> Scalar:
    """log softmax of the raw logits at `token`.  # logits [segments, lanes] f32 from `load_logits` -> [] f32"""
    best = highest(logits.shape, lambda columns: logits[:, columns])
    mass = total(logits.shape, lambda columns: jnp.exp(logits[:, columns] - best))
    tile, here = tile_of(logits.shape, token)
    at_token = jnp.sum(jnp.sum(jnp.where(here, logits[:, tile], 0.0), axis=0, keepdims=True), axis=1, keepdims=True)
    return jnp.max(at_token - best - jnp.log(mass))


def noise(sampling: RowSampling, position: Scalar, entry: jax.Array) -> jax.Array:
    """Gumbel noise of vocabulary entries.  # [segments, columns] i32 -> [segments, columns] f32"""
    at = jnp.full(entry.shape, position, jnp.int32).astype(jnp.uint32)
    bits, _ = threefry2x32(sampling.seed, (at, entry.astype(jnp.uint32)))
    return gumbel(bits)


def _filter(scratch: Scratch, best: jax.Array, sampling: RowSampling) -> None:
    """Sets what min-p, top-k and top-p drop to -inf, in that order; a filter runs only if it is asked for.

    `best` is the maximum of `scratch.scaled`, which no filter drops.  # [1, 1] f32
    """
    scaled, shape = scratch.scaled, scratch.scaled.shape

    @when(sampling.min_p > 0.0)
    def drop_unlikely() -> None:
        def drop(columns: Any, _: None) -> None:
            x = scaled[:, columns]
            scaled[:, columns] = jnp.where(jnp.exp(x - best) < sampling.min_p, -jnp.inf, x)

        for_pieces(shape, drop)

    @when(sampling.top_k > 0)
    def keep_likeliest() -> None:
        def count(columns: Any, _: None) -> None:
            scratch.mass[:, columns] = jnp.ones((shape[0], columns.size), jnp.float32)

        for_pieces(shape, count)
        _keep_within(jnp.full((1, 1), sampling.top_k, jnp.int32).astype(jnp.float32), scratch)

    @when(sampling.top_p < 1.0)
    def keep_nucleus() -> None:
        def weigh(columns: Any) -> jax.Array:
            mass = jnp.exp(scaled[:, columns] - best)
            scratch.mass[:, columns] = mass
            return mass

        _keep_within(sampling.top_p * total(shape, weigh), scratch)


def _keep_within(quota: jax.Array, scratch: Scratch) -> None:
    """Keeps the entries such that the mass of all entries ranked before them is below the quota.

    Rank: larger first, then lower index. The others become -inf.  # quota [1, 1] f32
    """
    scaled, shape = scratch.scaled, scratch.scaled.shape

    def mass_where(condition: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        def weigh(columns: Any) -> jax.Array:
            chosen = condition(sortable(scaled[:, columns]), entries(shape, columns))
            return jnp.where(chosen, scratch.mass[:, columns], 0.0)

        return total(shape, weigh)

    # The lowest threshold whose strictly larger entries weigh less than the quota: everything above it is in.
    lowest, first = jnp.full(quota.shape, _LOWEST_KEY, jnp.int32), jnp.zeros(quota.shape, jnp.int32)
    threshold = _bisect(lowest, 32, lambda t: mass_where(lambda key, entry: key > t) >= quota)
    room = quota - mass_where(lambda key, entry: key > threshold)
    bits = (shape[0] * shape[1] - 1).bit_length()
    last = _bisect(first, bits, lambda i: mass_where(lambda key, entry: (key == threshold) & (entry <= i)) < room)

    def drop(columns: Any, _: None) -> None:
        x = scaled[:, columns]
        key = sortable(x)
        kept = (key > threshold) | ((key == threshold) & (entries(shape, columns) <= last))
        scaled[:, columns] = jnp.where(kept, x, -jnp.inf)

    for_pieces(shape, drop)


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
