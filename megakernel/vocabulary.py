"""One row's numbers over the vocabulary as a kernel holds them, and passes over them in pieces.

The array is `[segments, lanes]`: entry (s, l) is vocabulary entry `s * lanes + l`. Segments are a multiple of the eight
sublanes of a TPU register, so whole registers are full; lanes are whole registers too. What lies past the vocabulary is
padding. A shard of the vocabulary is a block of `SEGMENTS` rows, that of core c beginning at row `c * SEGMENTS`.

A value of vocabulary size would be thousands of registers, of which a core has 64. So every pass loops over pieces of
columns of at most `PIECE_REGISTERS` registers, and what it carries is one tile of 128 lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megakernel.program import LANES

SEGMENTS = 8
PIECE_REGISTERS = 32
_FEWEST_TILES = 2
"""The TPU compiler loads one row of a buffer at a row known at run time, but not a single register of it."""
Shape = tuple[int, ...]
Combine = Callable[[jax.Array, jax.Array], jax.Array]


def vocabulary_shape(size: int, shards: int = 1) -> tuple[int, int]:
    """Segments and lanes that hold `size` entries in equal pieces."""
    segments = SEGMENTS * shards
    tiles = max(_FEWEST_TILES, -(-size // (segments * LANES)))
    pieces = _pieces(segments, tiles)
    return segments, pieces * -(-tiles // pieces) * LANES


def piece_count(shape: Shape) -> int:
    return _pieces(shape[0], shape[1] // LANES)


def _pieces(segments: int, tiles: int) -> int:
    most = max(1, PIECE_REGISTERS * SEGMENTS // segments)
    return -(-tiles // most)


def for_pieces(shape: Shape, body: Callable[[Any, Any], Any], start: Any = None) -> Any:
    """`carry = body(columns, carry)` for every piece, in order; `columns` is a slice of lanes."""
    return for_columns(shape[1], shape[1] // piece_count(shape), body, start)


def for_columns(lanes: int, width: int, body: Callable[[Any, Any], Any], start: Any = None) -> Any:
    """The same for pieces of `width` lanes; a single piece makes no loop."""
    if width == lanes:
        return body(pl.ds(0, width), start)

    def turn(piece: jax.Array, carry: Any) -> Any:
        return body(aligned(piece * width, width), carry)

    return lax.fori_loop(0, lanes // width, turn, start)


def aligned(start: jax.Array | int, lanes: int) -> Any:
    """Slice of lanes from a whole register on."""
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, LANES), lanes)


def entries(shape: Shape, columns: Any) -> jax.Array:
    """Vocabulary entry of every place of a piece.  # [segments, columns] i32"""
    piece = (shape[0], columns.size)
    segment, lane = (lax.broadcasted_iota(jnp.int32, piece, axis) for axis in (0, 1))
    return segment * shape[1] + (lane + columns.start)


def tile_of(shape: Shape, entry: jax.Array) -> tuple[Any, jax.Array]:
    """Columns of the tile that holds a vocabulary entry, and its place there.  # [segments, LANES] bool"""
    lane = lax.rem(entry, jnp.int32(shape[1]))
    columns = aligned(lane - lax.rem(lane, jnp.int32(LANES)), LANES)
    return columns, entries(shape, columns) == entry


def total(shape: Shape, piece: Callable[[Any], jax.Array]) -> jax.Array:
    """Sum of `piece(columns)` [segments, columns] f32 over all pieces, in an order that only the shape decides.

    Returns:
      [1, 1] f32
    """
    partial = _fold(shape, piece, jnp.add, 0.0)
    return jnp.sum(jnp.sum(partial, axis=0, keepdims=True), axis=1, keepdims=True)


def highest(shape: Shape, piece: Callable[[Any], jax.Array]) -> jax.Array:
    """Maximum of `piece(columns)` [segments, columns] f32 over all pieces.  # [1, 1] f32"""
    partial = _fold(shape, piece, jnp.maximum, -jnp.inf)
    return jnp.max(jnp.max(partial, axis=0, keepdims=True), axis=1, keepdims=True)


def lowest_entry(shape: Shape, piece: Callable[[Any], jax.Array]) -> jax.Array:
    """First entry for which `piece(columns)` [segments, columns] bool holds; else the last place.  # [] i32"""
    last = shape[0] * shape[1] - 1

    def found(columns: Any) -> jax.Array:
        return jnp.where(piece(columns), entries(shape, columns), last)

    return jnp.min(_fold(shape, found, jnp.minimum, last))


def _fold(shape: Shape, piece: Callable[[Any], jax.Array], combine: Combine, start: float) -> jax.Array:
    """Pieces laid over each other, tile by tile.  # [segments, LANES]"""

    def add(columns: Any, carry: jax.Array | None) -> jax.Array:
        value = piece(columns)
        tiles = [value[:, at : at + LANES] for at in range(0, columns.size, LANES)]
        while len(tiles) > 1:
            pairs = [combine(*tiles[at : at + 2]) for at in range(0, len(tiles) - 1, 2)]
            tiles = pairs + tiles[2 * len(pairs) :]
        return tiles[0] if carry is None else combine(carry, tiles[0])

    if piece_count(shape) == 1:
        return for_pieces(shape, add)
    kind = jnp.int32 if isinstance(start, int) else jnp.float32
    return for_pieces(shape, add, jnp.full((shape[0], LANES), start, kind))
