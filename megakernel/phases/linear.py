"""The streamed matrix product: tape blocks meet an operand that sits in VMEM."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from megakernel.plan import Plan
from megakernel.program import LANES, Matrix, round_up
from megakernel.stream import Ref, Scalar, Tape
from megakernel.tiling import Cut, Panel, Tiling, find_repeat

_UNROLLED_CUTS = 16
"""Products of at most this many cuts are written out; longer ones loop where they repeat."""
_UNIT_LANES = 256  # of a matrix unit that makes whole sums
_HALVED_INPUTS = 2 * _UNIT_LANES
"""Inputs that are multiplied in halves, as many as two matrix units take at once; shorter panels stay whole."""
_MOST_PARTS_HALVED = 2
"""Parts of a folded panel up to which it is: more of them fill the matrix units by themselves."""
_GROUP = 8
"""Rows that lie together where the halves' rows alternate: of a tile of float32."""


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


def linear(plan: Plan, tape: Tape, section: Scalar, x: jax.Array, matrix: Matrix, operand: Ref, out: Ref) -> None:
    """Multiplies `x` by a matrix of the section of the tape that begins with block `section`.

    Args:
      x: [rows, groups * k] f32; stored in `operand` in the activation format, k padded with zeros.
      out: [rows, groups * group_width] f32, receives the sums as they are in its first `plan.product_rows` rows;
        whoever reads them rounds.
    """
    tiling = plan.tilings[matrix.name]
    _store_operand(plan, x, matrix, operand)
    repeat = find_repeat(tiling) if tiling.cuts > _UNROLLED_CUTS else None

    def run(panels: Sequence[Panel], moved: Moved) -> None:
        for panel in panels:
            _run_panel(plan, tape, section, tiling, panel, moved, operand, out)

    if repeat is None:
        run(tiling.panels, Moved())
        return
    end = repeat.start + repeat.period * repeat.turns
    run(tiling.panels[: repeat.start], Moved())

    def turn(number: Scalar, _: None) -> None:
        moved = Moved(number * repeat.blocks, number * repeat.group, number * repeat.lane)
        run(tiling.panels[repeat.start : repeat.start + repeat.period], moved)

    lax.fori_loop(0, repeat.turns, turn, None)
    run(tiling.panels[end:], Moved())


@dataclasses.dataclass(frozen=True)
class Moved:
    """How far a turn of a repeated product stands from its first turn."""

    blocks: Scalar | int = 0
    group: Scalar | int = 0
    lane: Scalar | int = 0


def _run_panel(
    plan: Plan, tape: Tape, section: Scalar, tiling: Tiling, panel: Panel, moved: Moved, operand: Ref, out: Ref
) -> None:
    group = panel.group + moved.group
    in_halves = _multiplies_in_halves(plan, panel)
    total: jax.Array | None = None
    for cut in panel.cuts:
        block = section + (cut.block + moved.blocks)
        if cut.first:
            tape.wait(block)
        weights = tape.slot(block)[cut.row : cut.row + cut.rows]  # [cut rows, block lanes]
        inputs = _inputs(plan, tiling, panel, cut, group, operand)
        product = _product_of_halves(plan, inputs, weights) if in_halves else dot(plan, inputs, weights)
        total = product if total is None else total + product
        if cut.last:
            tape.give_back(block)
    assert total is not None
    lane = group * tiling.group_lanes + (panel.lane + moved.lane)
    if in_halves:
        total = _sum_of_halves(total, inputs.shape[0])
    _store(plan, _unfolded(plan, total, panel.fold), lane, panel.lane % LANES, out)


# ---- halves: so that both matrix units work, though a block is only as wide as one ----


def _multiplies_in_halves(plan: Plan, panel: Panel) -> bool:
    if not plan.target.sums_in_matrix_unit or plan.block_lanes > _UNIT_LANES:
        return False
    return sum(cut.rows for cut in panel.cuts) >= _HALVED_INPUTS and panel.fold <= _MOST_PARTS_HALVED


def _product_of_halves(plan: Plan, x: jax.Array, weights: jax.Array) -> jax.Array:
    """What `_sum_of_halves` makes `x @ weights` of."""
    starts = range(0, len(weights), _HALVED_INPUTS)
    pieces = [slice(start, min(start + _HALVED_INPUTS, len(weights))) for start in starts]
    products = (dot(plan, *_halves(x[:, piece], weights[piece])) for piece in pieces)
    return functools.reduce(operator.add, products)


def _halves(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Operands of one product as wide as two blocks: the weights' halves side by side, the inputs' below each other.

    Of the four quarters that come out, `_sum_of_halves` wants the two in which inputs met their own weights. Groups of
    rows of both halves alternate: were one half's rows in registers of their own, the compiler would leave out the
    other quarters and make both sums one chain, on one unit.

    [m, cut rows], [cut rows, lanes] -> [2 * m in whole groups, half], [half, 2 * lanes]
    """
    half = round_up(-(-len(weights) // 2), LANES)
    missing = 2 * half - len(weights)
    x = jnp.pad(x, ((0, -len(x) % _GROUP), (0, missing)))
    weights = jnp.pad(weights, ((0, missing), (0, 0)))
    groups = [x[row : row + _GROUP, start : start + half] for row in range(0, len(x), _GROUP) for start in (0, half)]
    return jnp.concatenate(groups, axis=0), jnp.concatenate([weights[:half], weights[half:]], axis=1)


def _sum_of_halves(product: jax.Array, rows: int) -> jax.Array:
    """[2 * rows in whole groups, 2 * lanes] f32 -> [rows, lanes] f32"""
    width = product.shape[1] // 2
    groups = [product[row : row + _GROUP] for row in range(0, len(product), _GROUP)]
    sums = [upper[:, :width] + lower[:, width:] for upper, lower in zip(groups[::2], groups[1::2], strict=True)]
    return jnp.concatenate(sums, axis=0)[:rows]


def _inputs(plan: Plan, tiling: Tiling, panel: Panel, cut: Cut, group: Scalar | int, operand: Ref) -> jax.Array:
    """The operand's part that meets a cut; the parts of a folded panel below each other.  # [parts * rows, cut rows]"""
    rows, size = plan.product_rows, sum(cut.rows for cut in panel.cuts)
    parts = []
    for part in range(-(-tiling.k_padded // size)):
        k = part * size + cut.k
        have = min(cut.rows, tiling.k_padded - k)
        if have > 0:
            inputs = operand[:rows, lanes(group * tiling.k_padded + k, have)]
            parts.append(jnp.pad(inputs, ((0, 0), (0, cut.rows - have))) if have < cut.rows else inputs)
        else:
            parts.append(jnp.zeros((rows, cut.rows), operand.dtype))
    return jnp.concatenate(parts, axis=0) if panel.fold > 1 else parts[0]


def _unfolded(plan: Plan, product: jax.Array, fold: int) -> jax.Array:
    """Adds up the parts of a folded panel: part i met the i-th share of the lanes.

    [parts * product rows, block lanes] f32 -> [product rows, lanes / fold, at least a whole tile] f32
    """
    if fold == 1:
        return product
    rows, width = plan.product_rows, product.shape[1] // fold
    lane = lax.broadcasted_iota(jnp.int32, (rows, product.shape[1]), 1)
    total = jnp.zeros((rows, product.shape[1]), jnp.float32)
    for part in range(len(product) // rows):
        own = (lane >= part * width) & (lane < (part + 1) * width)
        total = jnp.where(own, product[part * rows : (part + 1) * rows], total)
    while total.shape[1] > max(width, LANES):
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    shift = total.shape[1] // 2
    while shift >= width:
        total = total + pltpu.roll(total, shift, 1)
        shift //= 2
    return total


def _store(plan: Plan, total: jax.Array, lane: Scalar | int, inside: int, out: Ref) -> None:
    """Writes a panel's sums from lane `lane` of the output on, which is lane `inside` of its tile.

    A panel that begins inside a tile is narrower than one and repeats all over it; what other panels have written
    before it stays.
    """
    rows = plan.product_rows
    if not inside:
        out[:rows, lanes(lane, total.shape[1])] = total
        return
    tile = lanes(lane - inside, LANES)
    own = lax.broadcasted_iota(jnp.int32, total.shape, 1) >= inside
    out[:rows, tile] = jnp.where(own, total, out[:rows, tile])


def whole_tiles(rows: list[jax.Array], multiple: int) -> jax.Array:
    """Arrays below each other, padded with zero rows to a multiple of `multiple`.  # [.., n] each -> [m, n]"""
    missing = -sum(len(row) for row in rows) % multiple
    padding = [jnp.zeros((missing, rows[0].shape[1]), rows[0].dtype)] if missing else []
    return jnp.concatenate([*rows, *padding], axis=0)


def lanes(start: Scalar | int, size: int) -> Any:
    """A slice of `size` lanes from a tile-aligned `start`, known now or at run time."""
    return slice(start, start + size) if isinstance(start, int) else pl.ds(pl.multiple_of(start, size), size)


def _store_operand(plan: Plan, x: jax.Array, matrix: Matrix, operand: Ref) -> None:
    k_padded = plan.tilings[matrix.name].k_padded
    if k_padded == matrix.k:
        operand[:, : x.shape[1]] = x.astype(operand.dtype)
        return
    padding = jnp.zeros((plan.rows, k_padded - matrix.k), operand.dtype)
    for group in range(matrix.groups):
        operand[:, group * k_padded : group * k_padded + matrix.k] = x[:, group * matrix.k :][:, : matrix.k].astype(
            operand.dtype
        )
        operand[:, group * k_padded + matrix.k : (group + 1) * k_padded] = padding
