"""The visits of one layer (`megakernel.visits`) in SMEM, in ascending order of expert, then of tile.

A tile is one row, or all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from megakernel.limits import MAX_ROWS
from megakernel.plan import Plan
from megakernel.stream import Ref, Scalar

_TILE_BITS = (MAX_ROWS - 1).bit_length()


class Counts(NamedTuple):
    """Of one layer, on one core."""

    experts: Scalar
    visits: Scalar


@dataclasses.dataclass(frozen=True)
class Visits:
    """Where all rows make one tile, each expert has one visit and nothing is listed.

    Attributes:
      experts: [max distinct experts] i32, the distinct experts in ascending order.
      listed: [max visits + 1] i32, the order of a visit's expert among them and, in the low bits, its tile.
    """

    plan: Plan
    experts: Ref
    listed: Ref

    def list(self, order: Scalar, tiles: Scalar, count: Scalar) -> Scalar:
        """Lists the visits of the `order`-th expert after `count` others.

        Every tile's visit is written, and overwritten by the next one unless its bit of `tiles` is set.

        Returns:
          how many are listed then.
        """
        if self.plan.expert_tiles == 1:
            return count + 1
        for tile in range(self.plan.expert_tiles):
            self.listed[count] = order << _TILE_BITS | tile
            count = count + ((tiles >> tile) & 1)
        return count

    def order(self, visit: Scalar) -> Scalar:
        """Which of the distinct experts it is."""
        return visit if self.plan.expert_tiles == 1 else self.listed[visit] >> _TILE_BITS

    def expert(self, visit: Scalar) -> Scalar:
        return self.experts[self.order(visit)]

    def rows(self, visit: Scalar) -> Any:
        """The rows of its tile, as an index."""
        if self.plan.expert_tiles == 1:
            return slice(0, self.plan.expert_rows)
        return pl.ds(self.listed[visit] & (MAX_ROWS - 1), 1)

    def is_first(self, visit: Scalar) -> Scalar:
        """Whether the visit before, if any, was another expert's."""
        if self.plan.expert_tiles == 1:
            return jnp.bool_(True)
        before = jnp.maximum(visit - 1, 0)
        return (visit == 0) | (self.order(visit) != self.order(before))
