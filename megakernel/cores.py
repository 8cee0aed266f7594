"""What the phases of a layer ask of the other cores: whole vectors from pieces, and sums over cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.collectives import Exchange
from megakernel.messages import exact_lanes, total_widths
from megakernel.phases.linear import rounded, whole_tiles
from megakernel.plan import Plan
from megakernel.stream import Ref, Scalar
from megakernel.totals import OneHop, Totals, TwoHops
from megakernel.wire import join3, side_by_side, split3

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

    def start_gather(self, pieces: Sequence[Piece]) -> None: ...

    def finish_gather(self) -> list[jax.Array]:
        """The vectors whose pieces were given.  # [rows, at least total] f32 each"""
        ...

    def start_total(self, partial: jax.Array) -> None:
        """Begins to add up what each core has.  # [rows, width] f32"""
        ...

    def finish_total(self) -> jax.Array:
        """The sum over cores, in the activation format.  # [rows, width] f32"""
        ...


class OneCore:
    """Nobody to exchange with: every vector is whole and every sum complete."""

    first_expert = 0

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._in_flight: list[jax.Array] = []

    def start_gather(self, pieces: Sequence[Piece]) -> None:
        self._in_flight = [piece.value for piece in pieces]

    def finish_gather(self) -> list[jax.Array]:
        return self._in_flight

    def start_total(self, partial: jax.Array) -> None:
        self._in_flight = [rounded(self.plan, partial)]

    def finish_total(self) -> jax.Array:
        return self._in_flight[0]


class ManyCores:
    """Cores on the mesh axis `tp`; all of them run the same program in step, and hold the same bits of all they share.

    Args:
      pieces: exchange in which everyone gets everyone's piece, in the activation format.
      totals: by the number of hops, the exchange for such partial sums, see `megakernel.totals`.
    """

    def __init__(self, plan: Plan, pieces: Exchange, totals: Mapping[int, Exchange]):
        self.plan, self.split, self.pieces = plan, plan.split, pieces
        self.exchanges = (pieces, *totals.values())
        self._totals: dict[int, Totals] = {
            hops: OneHop(plan, exchange) if hops == 1 else TwoHops(plan, exchange, self._gather)
            for hops, exchange in totals.items()
        }
        self._summing: Totals | None = None
        self._in_flight: Sequence[Piece] = ()

    @property
    def me(self) -> Scalar:
        """This core's place on the mesh axis."""
        return self.pieces.me

    @property
    def first_expert(self) -> Scalar:
        group = lax.div(self.me, jnp.int32(self.split.expert_parts))
        return group * self.split.experts

    def start_gather(self, pieces: Sequence[Piece]) -> None:
        self._in_flight = pieces
        values = []
        for piece in pieces:
            value = piece.value[: self.plan.wire_rows]
            values.append(jnp.concatenate(split3(value), axis=1) if self._in_three(piece) else value)
        self.pieces.start_gather(*values)

    def finish_gather(self) -> list[jax.Array]:
        arrived = zip(self._in_flight, self.pieces.finish(), strict=True)
        return [self._all_rows(self._whole(piece, ref)) for piece, ref in arrived]

    def start_total(self, partial: jax.Array) -> None:
        width = partial.shape[1]
        assert width in total_widths(self.plan), f"no exchange was planned for sums of {width} entries"
        self._summing = self._totals[self.plan.hops(width)]
        self._summing.start(partial[: self.plan.wire_rows])

    def finish_total(self) -> jax.Array:
        assert self._summing is not None, "finish without a start"
        return self._all_rows(self._summing.finish())

    def _gather(self, own: jax.Array, total: int) -> jax.Array:
        """# [wire rows, piece] f32 -> [wire rows, total] f32"""
        self.start_gather([Piece(own, total)])
        return self.finish_gather()[0][: self.plan.wire_rows, :total]

    def _whole(self, piece: Piece, arrived: Ref) -> jax.Array:
        width = piece.value.shape[1]
        if not self._in_three(piece):
            return side_by_side(arrived, width, piece.total)
        return join3(*(side_by_side(arrived, width, piece.total, part * width) for part in range(3)))

    def _in_three(self, piece: Piece) -> bool:
        return piece.exact and exact_lanes(self.plan, 1) == 3

    def _all_rows(self, live: jax.Array) -> jax.Array:
        """Rows that did not travel are zero.  # [wire rows, n] -> [rows, n]"""
        return whole_tiles([live], self.plan.rows)
