"""Products with MXFP4 weights (OCP Microscaling: E2M1 codes, one E8M0 scale for 32 inputs).

Where the matrix unit takes 8-bit floats it gets the codes as they are, and the scales are applied to its sums: every
group of 32 inputs is summed apart, by an operand that holds each group of a row in a row of its own, and the few
outputs are scaled rather than the many weights. Elsewhere the weights are decoded to float32.
"""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from megakernel.bank import GROUP
from megakernel.phases.linear import dot, whole_tiles
from megakernel.plan import Plan

_SPREAD = 8
"""Groups summed by one product: the sublanes of a tile, and as many inputs as the largest matrix units take at once."""
_DEPTH = _SPREAD * GROUP
_UNIT = {"float8_e4m3fn": 1.0, "float8_e4m3b11fnuz": 2.0**10}
"""Value of a code over the value that the matrix unit sees."""


def mxfp4_dot(plan: Plan, x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """`[rows, k] @ [k, n]`, accumulated in float32; words in the order that `pack_mxfp4` gives this target.

    Args:
      x: [rows, k], rounded to the activation format; rows are `plan.expert_rows`.
      codes: [k / 8, n] u32; scales: [scale rows, n] u32.
    """
    if plan.target.fp4_as == "float32":
        return dot(plan, x, decode_mxfp4(codes, scales))
    rows, k = x.shape
    x = x.astype(jnp.float32) * _UNIT[plan.target.fp4_as]
    factors = _scale_factors(scales)
    by_group = rows % _SPREAD == 0
    totals: list[jax.Array] = []
    for start in range(0, k, _DEPTH):
        part, factor = x[:, start : start + _DEPTH], factors[start // GROUP : start // GROUP + _SPREAD]
        weights = eight_bit(plan, codes[start // 8 : (start + part.shape[1]) // 8])
        if by_group:
            sums = dot(plan, _groups_apart(part).astype(plan.activations), weights)  # [groups * rows, n]
            pieces = [
                sums[group * rows : (group + 1) * rows] * factor[group : group + 1]
                for group in range(part.shape[1] // GROUP)
            ]
        else:
            sums = dot(plan, _rows_apart(part).astype(plan.activations), weights)  # [rows * 8, n]
            pieces = [sums[row * _SPREAD : (row + 1) * _SPREAD] * factor for row in range(rows)]
        totals = [*map(operator.add, totals, pieces), *totals[len(pieces) :]] if totals else pieces
    return _sum_of_groups(totals) if by_group else jnp.concatenate([_sum_of_sublanes(total) for total in totals])


def eight_bit(plan: Plan, words: jax.Array) -> jax.Array:
    """E2M1 codes as the 8-bit floats of the matrix unit, exact up to a common factor `_UNIT`.

    Where it takes E4M3 with bias 11, exponent and mantissa bits of a code become the low exponent bits and the first
    mantissa bit: subnormal codes stay subnormal, so no code needs a case of its own. Minus zero would be NaN there.

    Args:
      words: [rows, n] u32, nibble j of row r being input 8 r + j.
    Returns:
      [8 * rows, n] f8
    """
    if plan.target.fp4_as == "float8_e4m3fn":
        return pltpu.bitcast(words, jnp.float4_e2m1fn).astype(jnp.float8_e4m3fn)
    extended = pltpu.bitcast(pltpu.bitcast(words, jnp.int4).astype(jnp.int8), jnp.uint32)  # bytes SSSSSEEM
    return pltpu.bitcast((extended << 2) & jnp.uint32(0x9C9C9C9C), jnp.float8_e4m3b11fnuz)  # bytes S00EEM00


def _scale_factors(words: jax.Array) -> jax.Array:
    """E8M0 scales to float32, then zeros up to whole tiles; byte b of row r is input group 4 r + b.

    # [rows, n] u32 -> [4 * rows + .., n] f32
    """
    exponents = pltpu.bitcast(words, jnp.uint8).astype(jnp.int32)
    return whole_tiles([lax.bitcast_convert_type(exponents << 23, jnp.float32)], _SPREAD)


def _groups_apart(x: jax.Array) -> jax.Array:
    """Row `g * rows + r` holds group g of row r and zeros.  # [rows, 32 * groups] -> [groups * rows, 32 * groups]"""
    group_of = lax.div(lax.broadcasted_iota(jnp.int32, x.shape, 1), jnp.int32(GROUP))
    return jnp.concatenate([jnp.where(group_of == group, x, 0.0) for group in range(x.shape[1] // GROUP)])


def _rows_apart(x: jax.Array) -> jax.Array:
    """Row `8 r + g` holds group g of row r and zeros.  # [rows, 32 * groups] -> [8 * rows, 32 * groups]"""
    shape = (_SPREAD, x.shape[1])
    group_of = lax.div(lax.broadcasted_iota(jnp.int32, shape, 1), jnp.int32(GROUP))
    own = group_of == lax.broadcasted_iota(jnp.int32, shape, 0)
    return jnp.concatenate(
        [jnp.where(own, jnp.broadcast_to(x[row : row + 1], shape), 0.0) for row in range(x.shape[0])]
    )


def _sum_of_groups(parts: list[jax.Array]) -> jax.Array:
    """Sum of up to eight arrays by halves: the order of `_sum_of_sublanes`."""
    for half in (4, 2, 1):
        parts = [*map(operator.add, parts, parts[half:]), *parts[max(len(parts) - half, 0) : half]]
    return parts[0]


def _sum_of_sublanes(x: jax.Array) -> jax.Array:
    """# [8, n] -> [1, n]"""
    for half in (4, 2, 1):
        x = x[:half] + x[half:]
    return x


def decode_mxfp4(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """MXFP4 to float32, exactly, by integer arithmetic.

    Args:
      codes: [k / 8, n] u32, nibble j of row r being input j * k / 8 + r.
      scales: [scale rows, n] u32, byte b of row r being input group b * scale rows + r.
    Returns:
      [k, n] f32
    """
    codes, exponents = (lax.bitcast_convert_type(words, jnp.int32) for words in (codes, scales))
    doubled = jnp.concatenate([_doubled_value(codes >> shift) for shift in range(0, 32, 4)])  # [k, n]
    exponents = jnp.concatenate([(exponents >> shift) & 255 for shift in range(0, 32, 8)])[: len(doubled) // GROUP]
    factors = 0.5 * lax.bitcast_convert_type(exponents << 23, jnp.float32)  # 2 ** (byte - 127), halved
    return doubled * jnp.repeat(factors, GROUP, axis=0)


def _doubled_value(words: jax.Array) -> jax.Array:
    """Twice the value of the E2M1 code in the low four bits.  # i32 -> f32, same shape

    The doubled magnitudes 0 1 2 3 4 6 8 12 of codes 0 to 7 are the upper envelope of three lines.
    """
    m = words & 7
    magnitude = jnp.maximum(jnp.maximum(m, 2 * m - 4), 4 * m - 16)
    return jnp.where((words & 8) > 0, -magnitude, magnitude).astype(jnp.float32)
