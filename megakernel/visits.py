"""Visits: an expert meets a tile of rows if one of them chose it. How many rows make a tile, and how many visits a step
is expected to have; rows are taken to choose independently and uniformly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megakernel.program import round_up
from megakernel.rates import EXPERT_BUNDLES
from model.config import ModelConfig

if TYPE_CHECKING:
    from megakernel.plan import Plan

_FEW_ROWS = 4
"""Products of up to so many rows compute just these; beyond, padding to a tile of 8 costs less."""


def tile_rows(plan: Plan) -> int:
    """Rows of the experts' products: all of them, or one where multiplying an expert once for each row that chose it
    costs less than multiplying each chosen expert for all rows."""
    if plan.config.expert_format == "bf16" or plan.target.fp4_as == "float32":
        return plan.product_rows
    every = plan.live_rows if plan.live_rows <= _FEW_ROWS else round_up(plan.live_rows, 8)
    return min((every, 1), key=lambda rows: _visits(plan.config, plan.live_rows, rows) * bundles(rows))


def bundles(rows: int) -> float:
    """Of a visit, for 1,024 MXFP4 weights."""
    return next(found for most, found in EXPERT_BUNDLES.items() if most >= rows)


def expected_experts(plan: Plan) -> float:
    """Distinct experts of a layer of which the busiest core is expected to read its part, in a step of live rows."""
    return plan.split.expected_load(plan.live_rows) * plan.split.expert_parts


def expected_visits(plan: Plan) -> float:
    """Visits of the experts of which the busiest core is expected to read its part."""
    config, rows = plan.config, plan.live_rows
    return expected_experts(plan) * _visits(config, rows, plan.expert_rows) / _visits(config, rows, rows)


def _visits(config: ModelConfig, live_rows: int, tile: int) -> float:
    """Of all experts of a layer, in a step of `live_rows` rows in tiles of `tile`."""
    chosen = config.num_experts_per_token / config.num_experts
    return config.num_experts * -(-live_rows // tile) * (1 - (1 - chosen) ** min(tile, live_rows))
