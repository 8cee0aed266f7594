"""The streamed matrix product: tape blocks meet an operand that sits in VMEM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megakernel.plan import Plan
from megakernel.program import Matrix
from megakernel.stream import Ref, Scalar, Tape, quotient

_UNROLLED_BLOCKS = 8
"""Products of at most this many blocks are written out; longer ones loop, so that compile time stays flat."""


def rounded(plan: Plan, x: jax.Array) -> jax.Array:
    """`x` through the plan's activation format, back in float32."""
    return x.astype(plan.activations).astype(jnp.float32)


def dot(plan: Plan, x: jax.Array, w: jax.Array) -> jax.Array:
    """`[m, k] @ [k, n]`, accumulated in float32. Float32 activations meet bfloat16 weights without loss."""
    if plan.target.multiplies_float32:
        return _multiply(x.astype(jnp.float32), widened(w), lax.Precision.HIGHEST)
    if x.dtype == jnp.float32:
        return _split_dot(x, w)
    return _multiply(x, w, None)


def _multiply(x: jax.Array, w: jax.Array, precision: lax.Precision | None) -> jax.Array:
    numbers = (((1,), (0,)), ((), ()))
    return lax.dot_general(x, w, numbers, precision=precision, preferred_element_type=jnp.float32)


def widened(w: jax.Array) -> jax.Array:
    """Weights as stored (see `Plan.storage`) to float32, without loss."""
    if w.dtype == jnp.uint16:
        return lax.bitcast_convert_type(w.astype(jnp.uint32) << 16, jnp.float32)
    return w.astype(jnp.float32)


def _split_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """Three bfloat16 pieces hold all 24 bits of a float32; pushing the weights dominates, so they ride together."""
    pieces = []
    for _ in range(3):
        piece = x.astype(jnp.bfloat16)
        pieces.append(piece)
        x = x - piece.astype(jnp.float32)
    high, middle, low = jnp.split(_multiply(jnp.concatenate(pieces), w, None), 3)
    return high + (middle + low)


def linear(plan: Plan, tape: Tape, index: Scalar, x: jax.Array, matrix: Matrix, operand: Ref, out: Ref) -> Scalar:
    """Multiplies `x` by the matrix whose first block is `index`; returns the index after its last block.

    Args:
      x: [rows, groups * k] f32; stored in `operand` in the activation format, k padded with zeros.
      out: [rows, groups * group_width] f32, receives the sums as they are in its first `plan.product_rows` rows;
        whoever reads them rounds.
    """
    tiling = plan.tiling(matrix)
    _store_operand(plan, x, matrix, operand)

    def inputs(group: Scalar | int, start: Scalar | int, size: int) -> jax.Array:
        return operand[: plan.product_rows, lanes(group * tiling.k_padded + start, size)]

    def store(tile: Scalar | int, product: jax.Array) -> None:
        out[: plan.product_rows, lanes(tile * plan.block_n, plan.block_n)] = product

    def long_tile(tile: Scalar | int) -> None:
        def add_block(step: Scalar | int, total: jax.Array) -> jax.Array:
            at = index + tile * tiling.k_tiles + step
            x_part = inputs(quotient(tile, tiling.tiles_per_group), step * plan.block_k, plan.block_k)
            total = total + dot(plan, x_part, tape.take(at)[...])  # [product rows, block_n]
            tape.give_back(at)
            return total

        zero = jnp.zeros((plan.product_rows, plan.block_n), jnp.float32)
        store(tile, _fold_over(tiling.k_tiles, add_block, zero))

    def folded_block(block: Scalar | int) -> None:
        weights = tape.take(index + block)[...]  # [fold * k_padded, block_n]
        for part in range(tiling.fold):
            tile = block * tiling.fold + part
            if isinstance(tile, int) and tile >= tiling.tiles:
                break
            group = _clamp(quotient(tile, tiling.tiles_per_group), matrix.groups - 1)
            rows = slice(part * tiling.k_padded, (part + 1) * tiling.k_padded)
            store(tile, dot(plan, inputs(group, 0, tiling.k_padded), weights[rows]))
        tape.give_back(index + block)

    if tiling.fold == 1:
        _repeat(tiling.tiles, long_tile, unrolled=tiling.blocks <= _UNROLLED_BLOCKS)
    else:
        _repeat(tiling.blocks, folded_block, unrolled=tiling.blocks <= _UNROLLED_BLOCKS)
    return index + tiling.blocks


def whole_tiles(rows: list[jax.Array], multiple: int) -> jax.Array:
    """Arrays below each other, padded with zero rows to a multiple of `multiple`.  # [.., n] each -> [m, n]"""
    missing = -sum(len(row) for row in rows) % multiple
    padding = [jnp.zeros((missing, rows[0].shape[1]), rows[0].dtype)] if missing else []
    return jnp.concatenate([*rows, *padding], axis=0)


def lanes(start: Scalar | int, size: int) -> Any:
    """A slice of `size` lanes from a tile-aligned `start`, known now or at run time."""
    return slice(start, start + size) if isinstance(start, int) else pl.ds(pl.multiple_of(start, size), size)


def _store_operand(plan: Plan, x: jax.Array, matrix: Matrix, operand: Ref) -> None:
    k_padded = plan.tiling(matrix).k_padded
    if k_padded == matrix.k:
        operand[:, : x.shape[1]] = x.astype(operand.dtype)
        return
    padding = jnp.zeros((plan.rows, k_padded - matrix.k), operand.dtype)
    for group in range(matrix.groups):
        operand[:, group * k_padded : group * k_padded + matrix.k] = x[:, group * matrix.k :][:, : matrix.k].astype(
            operand.dtype
        )
        operand[:, group * k_padded + matrix.k : (group + 1) * k_padded] = padding


def _repeat(count: int, body: Callable[[Any], None], unrolled: bool) -> None:
    if unrolled:
        for i in range(count):
            body(i)
    else:
        lax.fori_loop(0, count, lambda i, _: body(i), None)


def _fold_over(count: int, body: Callable[[Any, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    if count <= _UNROLLED_BLOCKS:
        for i in range(count):
            start = body(i, start)
        return start
    return lax.fori_loop(0, count, body, start)


def _clamp(group: Scalar | int, last: int) -> Scalar | int:
    return min(group, last) if isinstance(group, int) else jnp.minimum(group, last)
