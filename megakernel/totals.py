"""Sums over cores that every core needs whole, in one hop or in two.

In one hop every core sends everyone all of its partial sum, and everyone adds up. In two, the owner of a piece adds it
up and sends it to everyone. One hop waits for one exchange instead of two, and sends every other core the whole width
instead of a piece of it, so it is for few rows and many cores. The partial sums have passed through the wire's format,
are added in the order of the cores and rounded once, either way: so both give the same bits, on every core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import jax
import jax.numpy as jnp

from megakernel.collectives import Exchange
from megakernel.messages import EIGHT_BITS
from megakernel.phases.linear import rounded
from megakernel.plan import Plan
from megakernel.program import LANES, round_up
from megakernel.stream import Ref
from megakernel.wire import scaled, unscaled


class Totals(Protocol):
    def start(self, partial: jax.Array) -> None:
        """partial: [wire rows, width] f32."""
        ...

    def finish(self) -> jax.Array:
        """The sum, in the activation format.  # [wire rows, width] f32"""
        ...


def in_order(pieces: Iterable[jax.Array]) -> jax.Array:
    """The sum in the order of the cores: bits never depend on whose piece came first."""
    return functools.reduce(jnp.add, pieces)


class OneHop:
    """A row travels as lines of 128 lanes below each other, the line with its scale last."""

    def __init__(self, plan: Plan, exchange: Exchange):
        self.plan, self.exchange = plan, exchange
        self._shape = (0, 0)

    def start(self, partial: jax.Array) -> None:
        rows, width = partial.shape
        self._shape = rows, width
        row = jnp.concatenate([_whole_lines(value) for value in on_wire(self.plan, partial)], axis=1)
        self.exchange.start_gather(row.reshape(rows * row.shape[1] // LANES, LANES))

    def finish(self) -> jax.Array:
        rows, width = self._shape
        (pieces,) = self.exchange.finish()
        total = in_order(self._lines(pieces, core) for core in range(self.plan.split.cores))
        return rounded(self.plan, total.reshape(rows, round_up(width, LANES))[:, :width])

    def _lines(self, pieces: Ref, core: int) -> jax.Array:
        """What one core sent.  # [rows * lines of a row, LANES] f32"""
        rows, lines = self._shape[0], round_up(self._shape[1], LANES) // LANES
        if self.plan.wire not in EIGHT_BITS:
            return pieces[core, : rows * lines].astype(jnp.float32)
        values = pieces[core, : rows * (lines + 1)].astype(jnp.float32)
        firsts = range(0, rows * (lines + 1), lines + 1)
        scaled_rows = (values[first : first + lines + 1] for first in firsts)
        return jnp.concatenate([unscaled(row[:lines], row[lines:]) for row in scaled_rows])


class TwoHops:
    """`gather` puts the owners' pieces together: [wire rows, piece] f32, total width -> [wire rows, width] f32."""

    def __init__(self, plan: Plan, exchange: Exchange, gather: Callable[[jax.Array, int], jax.Array]):
        self.plan, self.exchange, self.gather = plan, exchange, gather
        self._width = 0

    def start(self, partial: jax.Array) -> None:
        self._width = partial.shape[1]
        values, *scale = on_wire(self.plan, partial)
        self.exchange.start_scatter(values, self.plan.split.sum_piece(self._width), *scale)

    def finish(self) -> jax.Array:
        own = in_order(self._pieces(self.exchange.finish()))
        return self.gather(rounded(self.plan, own), self._width)

    def _pieces(self, arrived: tuple[Ref, ...]) -> Iterator[jax.Array]:
        """# [wire rows, piece] f32 from each core"""
        pieces, *scale = arrived
        for core in range(self.plan.split.cores):
            piece = pieces[core].astype(jnp.float32)
            yield unscaled(piece, scale[0][core]) if scale else piece


def on_wire(plan: Plan, partial: jax.Array) -> tuple[jax.Array, ...]:
    """A partial sum as it travels, and what its scale is where it has one.  # [rows, width] f32, [rows, 2] f32"""
    return scaled(partial, plan.wire) if plan.wire in EIGHT_BITS else (partial,)


def _whole_lines(value: jax.Array) -> jax.Array:
    missing = -value.shape[1] % LANES
    return jnp.pad(value, ((0, 0), (0, missing))) if missing else value
