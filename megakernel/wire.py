"""What values look like on their way between cores: pieces side by side, and number formats of few bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from megakernel.program import LANES, round_up
from megakernel.stream import Ref

_EXPONENT_BIAS = 127  # of float32
_FLOAT8_BITS, _INT8_BITS = 7, 6  # a scaled row's peak lies in [2 ** bits, 2 ** (bits + 1))
_INT8_MAX = 127
_LARGEST_SHIFT = 121  # of the largest float32 on an int8 wire
_NOT_FINITE = 64
"""In place of the high part of an exponent: the row holds a NaN or an infinity."""


def side_by_side(pieces: Ref, width: int, total: int, first: int = 0) -> jax.Array:
    """Undoes the split of `total` columns into `width` per core: core c owns [c * width, min((c + 1) * width, total)).

    Args:
      pieces: [cores, rows, lanes]; a core's columns are its lanes `first` to `first + width`.
    Returns:
      [rows, total rounded up to 128] f32, zero beyond `total`.
    """
    padded, inside = round_up(total, LANES), first % LANES
    tiles: dict[int, jax.Array] = {}
    for core in range(-(-total // width)):
        for lane in (0, *range(LANES - inside, width, LANES)):
            place, shift = divmod(core * width + lane, LANES)
            tile, begin = divmod(first + lane, LANES)
            source = pieces[core, :, tile * LANES : (tile + 1) * LANES].astype(jnp.float32)
            _lay(tiles, place, shift, begin, source)
    laid = jnp.concatenate([tiles[place] for place in range(padded // LANES)], axis=1)
    column = lax.broadcasted_iota(jnp.int32, laid.shape, 1)
    return laid if total == padded else jnp.where(column < total, laid, 0.0)


def _lay(tiles: dict[int, jax.Array], place: int, shift: int, inside: int, source: jax.Array) -> None:
    """Lays lanes `inside` and following of `source` into tile `place` from lane `shift` on, over what was there."""
    move = (shift - inside) % LANES
    moved = pltpu.roll(source, move, 1) if move else source
    lane = lax.broadcasted_iota(jnp.int32, source.shape, 1)
    tiles[place] = jnp.where(lane < shift, tiles[place], moved) if shift else moved
    if shift > inside:
        tiles[place + 1] = moved


def one_tile(pieces: list[jax.Array], width: int) -> jax.Array:
    """The first `width` lanes of each piece, one after the other.  # each [rows, 128] f32 -> [rows, 128] f32"""
    lane = lax.broadcasted_iota(jnp.int32, pieces[0].shape, 1)
    tile = pieces[0]
    for number, piece in enumerate(pieces[1:], start=1):
        tile = jnp.where(lane < number * width, tile, pltpu.roll(piece, number * width, 1))
    return tile


def split3(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Three float32 values of bfloat16 precision whose sum is `x` exactly, so that statistics survive a bfloat16 wire.

    Holds for zeros and 2**-103 <= |x| < infinity; what is not finite arrives as NaN or infinity. Bits are cut off, not
    rounded: a compiler that may keep excess precision would drop a conversion to bfloat16 and back.
    """
    high = _leading_bits(x)
    middle = _leading_bits(x - high)
    return high, middle, x - high - middle


def join3(high: jax.Array, middle: jax.Array, low: jax.Array) -> jax.Array:
    """What `split3` took apart."""
    return high.astype(jnp.float32) + (middle.astype(jnp.float32) + low.astype(jnp.float32))


def statistics(*columns: jax.Array) -> jax.Array:
    """Float32 numbers, one of each kind a row, for a bfloat16 wire: three lanes each, see `split3`.

    Args:
      columns: each [rows, 1] f32.
    Returns:
      [rows, 3 * columns] f32
    """
    lanes = [lane for column in columns for lane in split3(column)]
    at = lax.broadcasted_iota(jnp.int32, (columns[0].shape[0], len(lanes)), 1)
    laid = jnp.zeros(at.shape, jnp.float32)
    for number, lane in enumerate(lanes):
        laid = jnp.where(at == number, lane, laid)
    return laid


def statistic(piece: jax.Array, number: int) -> jax.Array:
    """Column `number` of what `statistics` made.  # piece [rows, lanes] -> [rows, 1] f32"""
    high, middle, low = (piece[:, 3 * number + part : 3 * number + part + 1] for part in range(3))
    return join3(high, middle, low)


def _leading_bits(x: jax.Array) -> jax.Array:
    """`x` cut to the eight significant bits of a bfloat16."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return lax.bitcast_convert_type(bits, jnp.float32)


def scaled(x: jax.Array, wire: Any) -> tuple[jax.Array, jax.Array]:
    """`x` for a wire of eight bits: each row times a power of two that brings it into range, and the exponents.

    Args:
      x: [rows, width] f32.
      wire: one of `messages.EIGHT_BITS`.
    Returns:
      values in the wire's range [rows, width] f32, whole numbers for int8; exponents [rows, 2] f32, small whole numbers
      that both wires hold exactly. Of a row that is not finite all values are zero, and the exponents say so.
    """
    peak = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    bad = jnp.sum(jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0), axis=1, keepdims=True) > 0.0
    exponent = (lax.bitcast_convert_type(peak, jnp.int32) >> 23) - _EXPONENT_BIAS  # 2 ** exponent <= peak
    whole = jnp.issubdtype(wire, jnp.integer)
    shift = jnp.clip(exponent - (_INT8_BITS if whole else _FLOAT8_BITS), -_LARGEST_SHIFT, _LARGEST_SHIFT)
    values = jnp.where(bad, 0.0, x * _power_of_two(-shift))
    if whole:
        values = jnp.clip(jnp.round(values), -_INT8_MAX, _INT8_MAX)
    high = jnp.where(bad, _NOT_FINITE, shift >> 4)
    lane = lax.broadcasted_iota(jnp.int32, (x.shape[0], 2), 1)
    return values, jnp.where(lane == 0, high, shift & 15).astype(jnp.float32)


def unscaled(values: jax.Array, exponents: jax.Array) -> jax.Array:
    """What `scaled` scaled; NaN where it was not finite.

    values: [rows, width]; exponents: [rows, lanes], or [1, lanes] of one for all rows -> [rows, width] f32
    """
    high, low = (exponents[:, part : part + 1].astype(jnp.float32).astype(jnp.int32) for part in range(2))
    factor = jnp.where(high == _NOT_FINITE, jnp.nan, _power_of_two((high << 4) + low))
    return values.astype(jnp.float32) * factor


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + _EXPONENT_BIAS) << 23, jnp.float32)
