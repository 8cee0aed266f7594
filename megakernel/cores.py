"""What the phases of a layer ask of the other cores: whole vectors from pieces, and sums over cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from megakernel.plan import Plan


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


class OneCore:
    """Nobody to exchange with: every vector is whole and every sum complete."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def own_lanes(self, width: int) -> Any:
        return slice(0, width)

    def start_gather(self, pieces: Sequence[Piece]) -> None:
        self._gathered = [piece.value for piece in pieces]

    def finish_gather(self) -> list[jax.Array]:
        """The vectors whose pieces were given.  # [rows, total] f32 each"""
        return self._gathered

    def start_sum(self, partial: Sequence[jax.Array], statistic: jax.Array | None = None) -> None:
        self._sums, self._statistic = list(partial), statistic

    def finish_sum(self) -> list[jax.Array]:
        """Own pieces of the sums over cores.  # [rows, own width] f32 each"""
        return self._sums

    def finish_statistic(self) -> jax.Array:
        """The whole sum of what was given as `statistic`.  # [rows, 1] f32"""
        assert self._statistic is not None
        return self._statistic
