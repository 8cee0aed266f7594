"""MXFP4: exhaustive code tables, rounding against a search over all codes, numpy against JAX bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from model.quantize import E2M1_MAGNITUDES, decode_mxfp4, encode_mxfp4, round_to_mxfp4


def bits(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


def one_group(value: float) -> np.ndarray:
    """A group of 32 columns that starts with `value`, then 4.0 (so its scale is 1), then zeros."""
    group = np.zeros((1, 32), np.float32)
    group[0, :2] = value, 4.0
    return group


def first_code(value: float) -> int:
    return int(encode_mxfp4(one_group(value))[0][0, 0]) & 0xF


def random_weights(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Float32 weights whose groups span the whole exponent range, subnormal numbers included."""
    exponent = rng.integers(-149, 126, (rows, columns // 32, 1)) + rng.integers(-30, 2, (rows, columns // 32, 32))
    mantissa = rng.uniform(1, 2, exponent.shape) * rng.choice([-1, 1], exponent.shape)
    return np.ldexp(mantissa, exponent).astype(np.float32).reshape(rows, columns)


def test_every_byte_decodes_by_the_table():
    magnitudes = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = np.array(magnitudes + [-m for m in magnitudes], np.float32)
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    weight = decode_mxfp4(packed, np.full((16, 1), 127, np.uint8))
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(bits(weight[:, 0::2]), bits(table[packed & 15]))
    np.testing.assert_array_equal(bits(weight[:, 1::2]), bits(table[packed >> 4]))


def test_every_scale_byte():
    packed = np.full((252, 16), 0x72, np.uint8)
    scale = np.arange(1, 253, dtype=np.uint8)[:, None]
    weight = decode_mxfp4(packed, scale)
    exact = np.ldexp(1.0, np.arange(1, 253) - 127)
    np.testing.assert_array_equal(weight[:, 0].astype(np.float64), exact)
    np.testing.assert_array_equal(weight[:, 1].astype(np.float64), 6 * exact)


def test_groups_take_their_own_scale():
    packed = np.full((2, 48), 0x22, np.uint8)
    scale = np.array([[127, 128, 129], [126, 125, 124]], np.uint8)
    weight = decode_mxfp4(packed, scale).reshape(2, 3, 32)
    expected = np.array([[1, 2, 4], [0.5, 0.25, 0.125]])[..., None]
    np.testing.assert_array_equal(weight, np.broadcast_to(expected, weight.shape))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0), (0.25, 0), (0.2500001, 1), (0.5, 1), (0.7499999, 1), (0.75, 2), (1.0, 2), (1.25, 2), (1.2500001, 3),
        (1.5, 3), (1.7499999, 3), (1.75, 4), (2.0, 4), (2.5, 4), (2.5000002, 5), (3.0, 5), (3.4999998, 5), (3.5, 6),
        (4.0, 6), (5.0, 6), (5.0000005, 7), (6.0, 7), (7.9999995, 7),
        (-0.0, 8), (-0.25, 8), (-0.5, 9), (-1.0, 10), (-7.5, 15),
    ],
)  # fmt: skip
def test_ties_go_to_the_even_code(value: float, code: int):
    assert first_code(value) == code


@pytest.mark.parametrize("seed", range(4))
def test_encoding_takes_the_nearest_code(seed: int):
    weight = random_weights(np.random.default_rng(seed), 16, 96)
    packed, scale = encode_mxfp4(weight)
    assert (packed.shape, scale.shape) == ((16, 48), (16, 3))
    decoded = decode_mxfp4(packed, scale).astype(np.float64)
    unit = np.repeat(np.ldexp(1.0, scale.astype(int) - 127), 32, -1)
    candidates = np.array(E2M1_MAGNITUDES) * unit[..., None]
    nearest = np.abs(np.abs(weight.astype(np.float64))[..., None] - candidates).min(-1)
    np.testing.assert_array_equal(np.abs(weight - decoded), nearest)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(weight))


def test_scale_is_the_exponent_of_the_largest_weight_less_two():
    largest = np.array([4.0, 7.999, 8.0, 3.999, 1e-3, 1e30])
    weight = np.zeros((6, 32), np.float32)
    weight[:, 17] = -largest
    expected = np.floor(np.log2(largest)) - 2 + 127
    np.testing.assert_array_equal(encode_mxfp4(weight)[1][:, 0], expected)


def test_all_codes_and_scales_round_trip():
    rng = np.random.default_rng(0)
    scale = np.arange(1, 253, dtype=np.uint8)[:, None]
    packed = rng.integers(0, 256, (252, 16)).astype(np.uint8)
    packed[:, 0] = rng.choice([0x60, 0x70, 0xE0, 0xF0], 252)  # a magnitude of 4 or 6 fixes the group's scale
    again, scale_again = encode_mxfp4(decode_mxfp4(packed, scale))
    np.testing.assert_array_equal(again, packed)
    np.testing.assert_array_equal(scale_again, scale)


def test_group_of_zeros():
    weight = np.zeros((2, 64), np.float32)
    weight[1, 40] = 1.0
    packed, scale = encode_mxfp4(weight)
    np.testing.assert_array_equal(scale, [[127, 127], [127, 125]])
    np.testing.assert_array_equal(decode_mxfp4(packed, scale), weight)


def test_leading_axes():
    weight = random_weights(np.random.default_rng(3), 12, 64)
    packed, scale = encode_mxfp4(weight)
    stacked = encode_mxfp4(weight.reshape(3, 4, 64))
    np.testing.assert_array_equal(stacked[0].reshape(packed.shape), packed)
    np.testing.assert_array_equal(decode_mxfp4(*stacked).reshape(12, 64), decode_mxfp4(packed, scale))


@pytest.mark.parametrize("byte", [0, 255])
def test_refused_scale_bytes(byte: int):
    scale = np.full((3, 2), 127, np.uint8)
    scale[2, 1] = byte
    with pytest.raises(ValueError, match=rf"scale\[2, 1\] = {byte} is refused"):
        decode_mxfp4(np.zeros((3, 32), np.uint8), scale)


def test_weight_beyond_float32_is_refused():
    scale = np.full((2, 1), 254, np.uint8)
    packed = np.zeros((2, 16), np.uint8)
    assert not decode_mxfp4(packed, scale).any()
    packed[1, 3] = 0x07
    with pytest.raises(ValueError, match=r"scale\[1, 0\] = 254"):
        decode_mxfp4(packed, scale)


def test_refused_arrays():
    with pytest.raises(ValueError, match="do not belong together"):
        decode_mxfp4(np.zeros((2, 16), np.uint8), np.ones((2, 2), np.uint8))
    with pytest.raises(ValueError, match="multiple of 32"):
        decode_mxfp4(np.zeros((2, 8), np.uint8), np.ones((2, 0), np.uint8))
    with pytest.raises(TypeError, match="packed has dtype int8"):
        decode_mxfp4(np.zeros((2, 16), np.int8), np.ones((2, 1), np.uint8))
    with pytest.raises(ValueError, match="multiple of 32"):
        encode_mxfp4(np.zeros((2, 33), np.float32))
    with pytest.raises(TypeError, match="float64"):
        encode_mxfp4(np.zeros((2, 32)))
    with pytest.raises(ValueError, match=r"weight\[1, 5\] = nan"):
        encode_mxfp4(np.where(np.arange(64).reshape(2, 32) == 37, np.nan, 1).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("jit", [False, True])
def test_fake_quantisation_equals_encode_and_decode(dtype: type, jit: bool):
    weight = random_weights(np.random.default_rng(7), 64, 128).astype(dtype)
    weight[0, :64] = 0
    weight[1, :32] = -0.0
    weight[2, :32] = np.linspace(-8, 7.9, 32)
    function = jax.jit(round_to_mxfp4) if jit else round_to_mxfp4
    rounded = np.asarray(function(jnp.asarray(weight)))
    expected = decode_mxfp4(*encode_mxfp4(weight))
    assert rounded.dtype == dtype
    np.testing.assert_array_equal(bits(rounded), bits(expected.astype(dtype)))


def test_fake_quantisation_is_idempotent_and_straight_through():
    weight = jnp.asarray(random_weights(np.random.default_rng(9), 8, 64))
    rounded = round_to_mxfp4(weight)
    np.testing.assert_array_equal(round_to_mxfp4(rounded), rounded)
    slope = jnp.arange(512.0).reshape(8, 64)
    gradient = jax.grad(lambda w: (round_to_mxfp4(w) * slope).sum())(weight)
    np.testing.assert_array_equal(gradient, slope)


def test_fake_quantisation_spreads_nan_over_the_group_only():
    weight = np.ones((1, 96), np.float32)
    weight[0, 40] = np.inf
    rounded = np.asarray(round_to_mxfp4(jnp.asarray(weight)))
    assert np.isnan(rounded[0, 32:64]).all()
    np.testing.assert_array_equal(rounded[0, :32], 1)
    np.testing.assert_array_equal(rounded[0, 64:], 1)
    with pytest.raises(ValueError, match="multiple of 32"):
        jax.eval_shape(round_to_mxfp4, jax.ShapeDtypeStruct((4, 40), jnp.float32))
