"""Routed experts -> the two arrays of the bank (see `megakernel.bank`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megakernel.bank import GROUP, down_scales, mxfp4_rows
from megakernel.plan import Plan
from megakernel.split import Split
from model.checkpoint import CheckpointError
from model.layout import expert_name

Weights = Mapping[str, np.ndarray]
_MINUS_ZERO = 8


def pack_experts(
    plan: Plan,
    weights: Weights,
    layer: int,
    numbers: Sequence[int],
    core: int,
    bank_in: np.ndarray,
    bank_out: np.ndarray,
) -> None:
    """Fills one core's parts of some experts of one layer.

    Args:
      weights: tensors by the names of `model.layout`.
      numbers: of the experts among those that a core holds.
      bank_in, bank_out: [numbers, rows, lanes], zeros; see `memory.weight_buffers`.
    """
    config, split = plan.config, plan.split
    put = _put_bf16 if config.expert_format == "bf16" else _put_mxfp4
    group, part = divmod(core, split.expert_parts)
    own = slice(part * split.expert_width, (part + 1) * split.expert_width)
    for entry, number in enumerate(numbers):
        expert = group * split.experts + number
        if expert >= config.num_experts:
            break
        stems = [expert_name(layer, expert, matrix) for matrix in ("w1", "w3", "w2")]
        put(plan, weights, stems, own, bank_in[entry], bank_out[entry])


def _put_bf16(
    plan: Plan, weights: Weights, stems: list[str], own: slice, bank_in: np.ndarray, bank_out: np.ndarray
) -> None:
    gate, up, down = (weights[f"{stem}.weight"].T for stem in stems)
    both = np.concatenate([gate[:, own], up[:, own]], axis=1)
    bank_in[:, : both.shape[1]] = both
    bank_out[:, : down.shape[1]] = down[own]


def _put_mxfp4(
    plan: Plan, weights: Weights, stems: list[str], own: slice, bank_in: np.ndarray, bank_out: np.ndarray
) -> None:
    planar = plan.target.fp4_as == "float32"
    (gate, up), down = (_checked(weights, stem) for stem in stems[:2]), _checked(weights, stems[2])
    gate_up = [pack_mxfp4(codes[own], scale[own], planar=planar) for codes, scale in (gate, up)]
    both = np.concatenate([np.concatenate(pair) for pair in gate_up], axis=1)  # codes, scales below
    bank_in[: both.shape[0], : both.shape[1]] = both
    codes, scale = down
    inputs = slice(own.start // 2, own.stop // 2), slice(own.start // GROUP, -(-own.stop // GROUP))
    codes, scales = pack_mxfp4(codes[:, inputs[0]], scale[:, inputs[1]], planar=planar)
    bank_out[: codes.shape[0], : codes.shape[1]] = codes
    _put_down_scales(plan.split, scales, bank_in)


def _put_down_scales(split: Split, scales: np.ndarray, bank_in: np.ndarray) -> None:
    start = 0
    for rows, lanes in down_scales(split):
        piece = scales[:, start : start + lanes.stop]
        bank_in[rows, : piece.shape[1]] = piece
        start += lanes.stop


def _checked(weights: Weights, stem: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of one official MXFP4 matrix."""
    scale = weights[f"{stem}.weight_scale"]
    bad = (scale == 0) | (scale == 255)
    if bad.any():
        found = f"found {scale[bad][0]} at {np.argwhere(bad)[0].tolist()}"
        raise CheckpointError(f"tensor {stem}.weight_scale: expected MXFP4 scale bytes from 1 to 254; {found}")
    return weights[f"{stem}.weight_packed"], scale


def pack_mxfp4(packed: np.ndarray, scale: np.ndarray, *, planar: bool) -> tuple[np.ndarray, np.ndarray]:
    """Official MXFP4 -> words that decode without moving data across lanes (see `phases.mxfp4`).

    Args:
      packed: [out, in / 2] u8, low nibble first; scale: [out, in / 32] u8.
      planar: whether equal nibbles of consecutive rows are consecutive inputs; if not, the nibbles of one word are.
    Returns:
      (codes [in / 8, out] u32, scales [scale rows, out] u32); minus zero has become zero
    """
    k = 2 * packed.shape[1]
    code_rows, scale_rows = mxfp4_rows(k)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), k).T
    scales = np.zeros((4 * scale_rows, len(scale)), np.uint8)
    scales[: k // GROUP] = scale.T
    codes = np.where(codes == _MINUS_ZERO, 0, codes)
    return _words(codes, code_rows, planar), _words(scales, scale_rows, planar)


def _words(fields: np.ndarray, rows: int, planar: bool) -> np.ndarray:
    """Small fields to 32-bit words.  # [fields a word * rows, out] -> [rows, out] u32"""
    count = len(fields) // rows
    planes = fields.reshape(count, rows, -1) if planar else fields.reshape(rows, count, -1).swapaxes(0, 1)
    shifts = np.arange(0, 32, 32 // count, dtype=np.uint32)[:, None, None]
    return np.bitwise_or.reduce(planes.astype(np.uint32) << shifts, axis=0)
