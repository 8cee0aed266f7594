"""MXFP4, the number format of the routed experts: encode, decode and fake quantisation.

A group of 32 consecutive input columns shares one scale byte `s` (E8M0, value `2**(s - 127)`); every weight is a
4-bit E2M1 code, the sign in bit 3 and one of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 in the low three bits. Byte
`j` of a packed row holds column `2j` in its low nibble and column `2j + 1` in its high one.

`encode_mxfp4` and `round_to_mxfp4` share one integer routine that works on the bits of float32 numbers. Subnormal
numbers therefore round alike in numpy and on devices that flush them to zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from model.layout import MXFP4_GROUP

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ZERO_GROUP_SCALE = 127
"""Scale byte of a group whose weights are all zero."""

_SIGN = 0x8000_0000
_INFINITY = 0x7F80_0000
_MANTISSA_BITS = 23
# Magnitudes halfway between two codes, in quarters of the group's scale. A tie goes to the even code: the midpoint
# above an even code belongs to that code, the midpoint above an odd code to the next one.
_MIDPOINT_QUARTERS = (1, 3, 5, 7, 10, 14, 20)


def decode_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The weights of an MXFP4 matrix.

    Args:
      packed: uint8 [..., in / 2], two codes a byte, the even column in the low nibble.
      scale: uint8 [..., in / 32], one exponent byte for each row and group of 32 input columns.

    Returns:
      float32 [..., in]; exact (each value has at most two significant bits).

    Raises:
      TypeError: an array that is not uint8.
      ValueError: shapes that do not belong together, scale bytes 0 or 255, or a weight beyond the float32 range.
    """
    packed, scale = np.asarray(packed), np.asarray(scale)
    for name, array in (("packed", packed), ("scale", scale)):
        if array.dtype != np.uint8:
            raise TypeError(f"{name} has dtype {array.dtype}; expected uint8")
    columns = 2 * packed.shape[-1] if packed.ndim else 0
    expected = (*packed.shape[:-1], columns // MXFP4_GROUP)
    if packed.ndim == 0 or columns % MXFP4_GROUP or scale.shape != expected:
        raise ValueError(
            f"packed {packed.shape} and scale {scale.shape} do not belong together; expected packed [..., in / 2] "
            f"and scale [..., in / {MXFP4_GROUP}] with in a multiple of {MXFP4_GROUP}"
        )
    refused = (scale == 0) | (scale == 255)
    if refused.any():
        where = _first(refused)
        raise ValueError(
            f"scale{list(where)} = {scale[where]} is refused; MXFP4 scale bytes are 1 to 254 "
            "(0 would be a subnormal scale, 255 is NaN): the checkpoint is damaged"
        )
    low, high = packed & 0xF, packed >> 4
    codes = np.stack([low, high], axis=-1).reshape(*scale.shape, MXFP4_GROUP)
    weight = _code_values()[codes]
    with np.errstate(over="ignore"):
        weight *= np.ldexp(np.float32(1), scale.astype(np.int32) - 127)[..., None]
    if scale.size and scale.max() > 252 and not np.isfinite(weight).all():
        where = _first(~np.isfinite(weight).all(-1))
        raise ValueError(f"scale{list(where)} = {scale[where]} takes a weight beyond float32; expected at most 252")
    return weight.reshape(*packed.shape[:-1], columns)


def encode_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a matrix to MXFP4.

    The scale of a group is `2**(floor(log2(max |w|)) - 2)`, held to scale bytes 1 to 254; codes are rounded to the
    nearest, ties to the even code, magnitudes over 6 to 6. A group of zeros gets scale byte 127. Zeros keep their
    sign (code 8 is -0).

    Args:
      weight: float32 or bfloat16 [..., in], `in` a multiple of 32.

    Returns:
      packed uint8 [..., in / 2] and scale uint8 [..., in / 32].

    Raises:
      TypeError: another dtype (rounding float64 to float32 first would round twice).
      ValueError: `in` is not a multiple of 32, or a weight is NaN or infinite.
    """
    weight = np.asarray(weight)
    _check_weight(weight)
    bits = np.ascontiguousarray(weight, np.float32).view(np.uint32)
    if ((bits & _INFINITY) == _INFINITY).any():
        where = _first((bits & _INFINITY) == _INFINITY)
        raise ValueError(f"weight{list(where)} = {weight[where]}; MXFP4 holds finite numbers only")
    groups = bits.reshape(*weight.shape[:-1], weight.shape[-1] // MXFP4_GROUP, MXFP4_GROUP)
    codes, scale = _round_bits(groups, np)
    codes = (codes | (groups >> 28 & 8)).astype(np.uint8).reshape(weight.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale[..., 0].astype(np.uint8)


@jax.custom_jvp
def round_to_mxfp4(w: jax.Array) -> jax.Array:
    """Fake quantisation for training: `decode_mxfp4(*encode_mxfp4(w))` bit for bit, traceable by JAX.

    The gradient is straight-through: the rounding counts as the identity. A group that holds NaN or infinity comes
    back as NaN, since a traced function cannot raise.

    Args:
      w: float32 or bfloat16 [..., in], `in` a multiple of 32; groups run along the last axis.

    Returns:
      The rounded weights in the shape and dtype of `w` (both dtypes hold them exactly).

    Raises:
      TypeError, ValueError: as `encode_mxfp4` does for dtype and shape, while tracing.
    """
    _check_weight(w)
    half = w.dtype == jnp.bfloat16
    bits = jax.lax.bitcast_convert_type(w, jnp.uint16 if half else jnp.uint32).astype(jnp.uint32) << (16 if half else 0)
    groups = bits.reshape(*w.shape[:-1], w.shape[-1] // MXFP4_GROUP, MXFP4_GROUP)
    codes, scale = _round_bits(groups, jnp)
    rounded = _magnitude_bits(codes, scale, jnp) | (groups & jnp.uint32(_SIGN))
    broken = ((groups & jnp.uint32(_INFINITY)) == _INFINITY).any(-1, keepdims=True)
    rounded = jnp.where(broken, jnp.uint32(0x7FC0_0000), rounded).reshape(w.shape)
    return jax.lax.bitcast_convert_type((rounded >> 16).astype(jnp.uint16) if half else rounded, w.dtype)


@round_to_mxfp4.defjvp
def _straight_through(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return round_to_mxfp4(*primals), tangents[0]


def _round_bits(groups: Any, xp: Any) -> tuple[Any, Any]:
    """Codes without sign, and scale bytes, of float32 bit patterns.

    Args:
      groups: uint32 [..., 32], bits of finite float32 numbers (numpy or JAX, as `xp`).

    Returns:
      uint32 [..., 32] and uint32 [..., 1].
    """
    uint = xp.uint32
    magnitude = groups & uint(_SIGN - 1)
    largest = magnitude.max(-1, keepdims=True)
    # floor(log2(largest)) is the biased exponent minus 127. The scale byte is that minus 2 plus 127.
    top = largest >> uint(_MANTISSA_BITS)
    scale = xp.where(largest == 0, uint(ZERO_GROUP_SCALE), xp.where(top <= 3, uint(1), top - uint(2)))
    # |w| / 2**(scale - 127) as a fixed-point number with 23 fraction bits: significand shifted by exponent - scale,
    # where the bits that fall off are gathered in the last one (it only matters whether a midpoint is passed).
    exponent = magnitude >> uint(_MANTISSA_BITS)
    fraction = magnitude & uint((1 << _MANTISSA_BITS) - 1)
    significand = xp.where(exponent == 0, fraction, fraction | uint(1 << _MANTISSA_BITS))
    exponent = xp.maximum(exponent, uint(1))
    left = xp.where(exponent > scale, exponent - scale, uint(0))
    right = xp.minimum(xp.where(exponent < scale, scale - exponent, uint(0)), uint(31))
    shifted = significand >> right
    lost = (shifted << right) != significand
    ratio = (shifted << left) | lost.astype(uint)
    codes = xp.zeros_like(groups)
    for below, quarters in enumerate(_MIDPOINT_QUARTERS):
        midpoint = uint(quarters << (_MANTISSA_BITS - 2))
        codes = codes + (ratio > midpoint if below % 2 == 0 else ratio >= midpoint).astype(uint)
    return codes, scale


def _magnitude_bits(codes: Any, scale: Any, xp: Any) -> Any:
    """float32 bits of `E2M1_MAGNITUDES[codes] * 2**(scale - 127)`; code 1 is a subnormal float32 when scale is 1."""
    uint = xp.uint32
    base = (scale - uint(1)) << uint(_MANTISSA_BITS)
    half = xp.where(scale == 1, uint(1 << (_MANTISSA_BITS - 1)), base)
    return xp.where(codes == 0, uint(0), xp.where(codes == 1, half, base + (codes << uint(_MANTISSA_BITS - 1))))


def _code_values() -> np.ndarray:
    positive = np.array(E2M1_MAGNITUDES, np.float32)
    return np.concatenate([positive, -positive])


def _check_weight(weight: Any) -> None:
    if weight.dtype not in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        raise TypeError(f"weight has dtype {weight.dtype}; expected float32 or bfloat16")
    if weight.ndim == 0 or weight.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"weight has shape {weight.shape}; the last axis must be a multiple of {MXFP4_GROUP}")


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0])
