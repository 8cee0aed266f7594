"""What the phases of a layer ask of the other cores: whole vectors from pieces, and sums over cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megakernel.collectives import Exchange, join3, side_by_side, split3, statistic, statistics
from megakernel.phases.linear import whole_tiles
from megakernel.plan import Plan
from megakernel.program import LANES, round_up
from megakernel.stream import Scalar

AXIS = "tp"
"""The mesh axis over which a model is divided."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """One core's piece of a vector of `total` entries.

    Attributes:
      value: [rows, piece] f32.
      exact: the receivers need every bit of the float32 values; otherwise they are in the activation format.
    """

    value: jax.Array
    total: int
    exact: bool = False


class Cores(Protocol):
    """Gathers and sums, one at a time. Work that does not need what is exchanged goes between start and finish."""

    @property
    def first_expert(self) -> Scalar | int:
        """First of the experts of which this core holds a part."""
        ...

    def own_lanes(self, width: int) -> Any:
        """Lanes of this core's piece of a vector that is summed over cores."""
        ...

    def start_gather(self, pieces: Sequence[Piece]) -> None: ...

    def finish_gather(self) -> list[jax.Array]:
        """The vectors whose pieces were given.  # [rows, at least total] f32 each"""
        ...

    def start_sum(self, partial: Sequence[jax.Array], number: jax.Array | None = None) -> None:
        """Begins to add up partial sums over cores, and one number a row that every core needs.

        partial: [rows, width] f32 each; number: [rows, 1] f32.
        """
        ...

    def finish_sum(self) -> list[jax.Array]:
        """Own pieces of the sums over cores, and last the sum of the numbers.  # [rows, own width or 1] f32 each"""
        ...


class OneCore:
    """Nobody to exchange with: every vector is whole and every sum complete."""

    first_expert = 0

    def __init__(self) -> None:
        self._in_flight: list[jax.Array] = []

    def own_lanes(self, width: int) -> Any:
        return slice(0, width)

    def start_gather(self, pieces: Sequence[Piece]) -> None:
        self._in_flight = [piece.value for piece in pieces]

    def finish_gather(self) -> list[jax.Array]:
        return self._in_flight

    def start_sum(self, partial: Sequence[jax.Array], number: jax.Array | None = None) -> None:
        self._in_flight = [*partial] if number is None else [*partial, number]

    def finish_sum(self) -> list[jax.Array]:
        return self._in_flight


class ManyCores:
    """Cores on the mesh axis `tp`; all of them run the same program in step.

    Sums are taken in the order of the cores by the core that owns the piece, and gathered from there, so that all cores
    hold the same bits of everything that they share.
    """

    def __init__(self, plan: Plan, exchange: Exchange):
        self.plan, self.split, self.exchange = plan, plan.split, exchange
        self.exact_wire = exchange.inbox.dtype == jnp.float32
        self._pieces: Sequence[Piece] = ()
        self._widths: list[int] = []
        self._has_number = False

    @property
    def first_expert(self) -> Scalar:
        group = lax.div(self.exchange.me, jnp.int32(self.split.expert_parts))
        return group * self.split.experts

    def own_lanes(self, width: int) -> Any:
        """A core that owns nothing looks at the last piece; nobody looks at what it makes of it."""
        piece = self.split.sum_piece(width)
        last = self.split.owners(width, piece) - 1
        return pl.ds(pl.multiple_of(jnp.minimum(self.exchange.me, last) * piece, LANES), piece)

    def start_gather(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        values: list[jax.Array] = []
        for piece in pieces:
            value = piece.value[: self.plan.wire_rows]
            values += split3(value) if self._in_three(piece) else [value]
        self.exchange.start_gather(*values)

    def finish_gather(self) -> list[jax.Array]:
        arrived = iter(self.exchange.finish())
        whole = []
        for piece in self._pieces:
            width = piece.value.shape[1]
            parts = [side_by_side(next(arrived), width, piece.total) for _ in range(3 if self._in_three(piece) else 1)]
            whole.append(self._all_rows(join3(*parts) if len(parts) == 3 else parts[0]))
        return whole

    def _all_rows(self, live: jax.Array) -> jax.Array:
        """Rows that did not travel are zero.  # [wire rows, n] -> [rows, n]"""
        return whole_tiles([live], self.plan.rows)

    def _in_three(self, piece: Piece) -> bool:
        return piece.exact and not self.exact_wire

    def start_sum(self, partial: Sequence[jax.Array], number: jax.Array | None = None) -> None:
        self._widths = [self.split.sum_piece(value.shape[1]) for value in partial]
        self._has_number = number is not None
        rows = self.plan.wire_rows
        partial = [value[:rows] for value in partial]
        shared = [] if number is None else [statistics(number[:rows])]
        width = sum(self._widths) + sum(value.shape[1] for value in shared)

        def piece_of(core: int) -> jax.Array | None:
            own = [_lanes_of(value, core, size) for value, size in zip(partial, self._widths, strict=True)]
            return jnp.concatenate([*own, *shared], axis=1)

        self.exchange.start_each(piece_of, width)

    def finish_sum(self) -> list[jax.Array]:
        total = self._all_rows(self.exchange.finish_sum())
        sums, first = [], 0
        for width in self._widths:
            sums.append(total[:, first : first + width])
            first += width
        return [*sums, statistic(total[:, first:], 0)] if self._has_number else sums


def _lanes_of(value: jax.Array, core: int, width: int) -> jax.Array:
    """Columns of one core, zeros past the end.  # [rows, n] -> [rows, width]"""
    if core * width >= value.shape[1]:
        return jnp.zeros((value.shape[0], width), value.dtype)
    own = value[:, core * width : (core + 1) * width]
    return jnp.pad(own, ((0, 0), (0, width - own.shape[1]))) if own.shape[1] < width else own


def exchange_lanes(plan: Plan) -> int:
    """Lanes of the widest piece that one core sends another."""
    split, config = plan.split, plan.config
    exact = 1 if plan.wire == "float32" else 3

    def tiles(*widths: int) -> int:
        return sum(round_up(width, LANES) for width in widths)

    gathers = [tiles(split.hidden)]
    sums = [tiles(split.hidden)]
    if config.kda_layers:
        gathers.append((1 if config.use_full_rank_gate else 2) * tiles(split.piece(config.kda_head_dim)))
    if config.mla_layers:
        gathers.append(tiles(split.piece(split.low_width)))
    if plan.moe_layers:
        latent = [split.piece(config.routed_expert_hidden_size)] if config.latent_experts else []
        gathers.append(exact * tiles(split.piece(config.num_experts)) + tiles(*latent))
        sums += [tiles(split.sum_piece(config.routed_expert_hidden_size)), 2 * tiles(split.hidden) + LANES]
    drafts = plan.drafter.exchange_lanes(split) if plan.drafter else 0
    return max(*gathers, *sums, drafts)
