"""Where one expert's parts lie in the two arrays of the bank.

`bank_in` holds gate and up side by side, `bank_out` down. With MXFP4 weights the scales lie below the codes of gate and
up, first their own, then those of down: below the few rows of down itself they would cost a whole tile of rows. Down
has more lanes than gate and up together, so its scales are cut to that width and the pieces lie below each other.
"""

from __future__ import annotations

from megakernel.program import LANES, round_up
from megakernel.split import Split

GROUP = 32
"""Inputs that share a scale."""
_TILE_ROWS = 8
"""Rows of one tile of 32-bit words."""

Shape = tuple[int, int]


def mxfp4_rows(k: int) -> Shape:
    """32-bit rows of one expert matrix with k inputs: eight 4-bit codes a word, then four 8-bit scales a word."""
    return k // 8, -(-(k // GROUP) // 4)


def expert_shapes(split: Split) -> tuple[Shape, Shape]:
    """Rows and lanes of one core's part of an expert in `bank_in` and in `bank_out`."""
    config, inner = split.config, split.expert_width
    latent = config.routed_expert_hidden_size
    lanes_in, lanes_out = round_up(2 * inner, LANES), round_up(latent, LANES)
    if config.expert_format == "bf16":
        return (latent, lanes_in), (inner, lanes_out)
    rows_in = down_scales(split)[-1][0].stop
    return (round_up(rows_in, _TILE_ROWS), lanes_in), (round_up(mxfp4_rows(inner)[0], _TILE_ROWS), lanes_out)


def down_scales(split: Split) -> list[tuple[slice, slice]]:
    """Rows and lanes of `bank_in` that hold the scales of down, piece by piece in the order of down's lanes."""
    latent = split.config.routed_expert_hidden_size
    lanes_in, lanes_out = round_up(2 * split.expert_width, LANES), round_up(latent, LANES)
    first, rows = sum(mxfp4_rows(latent)), mxfp4_rows(split.expert_width)[1]
    return [
        (slice(first + i * rows, first + (i + 1) * rows), slice(0, min(lanes_in, lanes_out - i * lanes_in)))
        for i in range(-(-lanes_out // lanes_in))
    ]
