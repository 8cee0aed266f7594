"""What a plan chooses by its bytes: how experts are divided over cores, and the shape of a tape block."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from megakernel import bank, program
from megakernel.limits import PlanError
from megakernel.program import LANES
from megakernel.split import Split, split_choices
from megakernel.target import MIB
from megakernel.tiling import lay_out
from model.config import ModelConfig

_BLOCK_COST_BYTES, _CUT_COST_BYTES = 8 << 10, 1 << 10
"""Cost of handling one block and one cut of a panel, as bytes of stream: what the search trades against padding."""
_MAX_BLOCK_BYTES = MIB // 4
"""As much as a core's 64 vector registers hold: all of a block is loaded before the copy after it can start."""


def choose_split(config: ModelConfig, cores: int, expert_groups: int | None, rows: int) -> Split:
    if isinstance(cores, bool) or not isinstance(cores, int) or cores < 1:
        raise PlanError(f"cores = {cores!r}; expected a positive integer")
    choices = split_choices(config, cores)
    if expert_groups is not None:
        choices = [split for split in choices if split.expert_groups == expert_groups]
    if not choices:
        possible = " or ".join(str(split.expert_groups) for split in split_choices(config, cores))
        asked = f" in {expert_groups} groups" if expert_groups is not None else ""
        raise PlanError(
            f"{cores} cores cannot share experts of width {config.moe_intermediate_size}{asked}: each core's part must "
            f"be whole groups of 32; expert_groups may be {possible}"
        )
    if cores > 1 and config.hidden_size % LANES:
        raise PlanError(f"hidden_size = {config.hidden_size} is no multiple of {LANES}: {cores} cores cannot share it")
    return min(choices, key=lambda split: split.expected_load(rows) * split.expert_parts * _expert_words(split))


def _expert_words(split: Split) -> int:
    return sum(math.prod(shape) for shape in bank.expert_shapes(split))


def choose_block(split: Split, item_bytes: int) -> tuple[int, int]:
    """The block shape with the least bytes to stream, counting padding and a fixed cost a block and a cut."""
    order = Counter(program.section_order(split.config))

    def cost(shape: tuple[int, int]) -> float:
        rows, lanes = shape
        total = 0
        for name, matrices in program.sections(split).items():
            tilings, blocks = lay_out(matrices, rows, lanes)
            cuts = sum(tiling.cuts for tiling in tilings.values())
            total += order[name] * (blocks * (rows * lanes * item_bytes + _BLOCK_COST_BYTES) + cuts * _CUT_COST_BYTES)
        return total

    shapes = itertools.product(range(2 * LANES, 4096 + 1, LANES), (256, 512))
    return min((s for s in shapes if s[0] * s[1] * item_bytes <= _MAX_BLOCK_BYTES), key=cost)
