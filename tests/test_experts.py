"""One expert's products: each code under each scale exactly, sums within float32, rows apart from each other."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from megakernel import Plan, find_target, make_plan
from megakernel.memory import weight_buffers
from megakernel.pack_experts import pack_experts, pack_mxfp4
from megakernel.phases.experts import expert_hidden, expert_output
from megakernel.phases.mxfp4 import decode_mxfp4, mxfp4_dot
from megakernel.split import Split
from megakernel.target import TARGETS
from model.config import ModelConfig
from model.layout import expert_name
from model.quantize import decode_mxfp4 as decode_official

LANES = 128
FORMS = {target.fp4_as: name for name, target in TARGETS.items()}
ONE_OF_EACH = sorted(FORMS.values())
"""Targets that multiply 4-bit weights in different forms."""
ROWS = (1, 2, 3, 4, 8, 16)
INTERPRETERS = {"interpret": True, "simulate": pltpu.InterpretParams()}
SMALL = dataclasses.replace(ModelConfig.preset("k3-nano"), num_experts=4, num_experts_per_token=2)


@functools.cache
def plan_for(target: str, rows: int = 1, config: ModelConfig = SMALL, activations: Any = None) -> Plan:
    return make_plan(config, find_target(target), sequences=rows, context=64, activations=activations)


def product(plan: Plan, x: np.ndarray, words: tuple[np.ndarray, ...], interpreter: str = "interpret") -> np.ndarray:
    """`mxfp4_dot` of one plan inside a kernel.  # x [rows, k] f32 -> [rows, n] f32"""
    return np.asarray(_compiled_product(plan, interpreter)(jnp.asarray(x, plan.activations), *words))


@functools.cache
def _compiled_product(plan: Plan, interpreter: str) -> Any:
    def kernel(x: Any, codes: Any, scales: Any, out: Any) -> None:
        out[...] = mxfp4_dot(plan, x[...], codes[...], scales[...])

    def run(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((len(x), codes.shape[1]), jnp.float32)
        return pl.pallas_call(kernel, out_shape=shape, interpret=INTERPRETERS[interpreter])(x, codes, scales)

    return jax.jit(run)


def random_matrix(seed: int, out: int, k: int, low: int = 110, high: int = 130) -> tuple[np.ndarray, np.ndarray]:
    """Official codes and scales.  # [out, k / 2] u8, [out, k / 32] u8"""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (out, k // 2), np.uint8), rng.integers(low, high, (out, k // 32), np.uint8)


def words_for(plan: Plan, packed: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return pack_mxfp4(packed, scale, planar=plan.target.fp4_as == "float32")


def every_code_and_scale() -> tuple[np.ndarray, np.ndarray]:
    """All 16 codes in each half group under all scales whose weights are normal numbers; 512 inputs, 128 outputs."""
    bytes_of_codes = np.array([(2 * i + 1) << 4 | 2 * i for i in range(8)], np.uint8)
    packed = np.tile(bytes_of_codes, (LANES, 32))
    scale = 2 + np.arange(LANES * 16) % 251  # 2 to 252
    return packed, np.random.default_rng(0).permutation(scale).astype(np.uint8).reshape(LANES, 16)


@pytest.mark.parametrize("interpreter", INTERPRETERS)
@pytest.mark.parametrize("target", ONE_OF_EACH)
def test_every_code_under_every_scale_is_exact(target: str, interpreter: str) -> None:
    """One input of 1 reads one row of weights."""
    plan = plan_for(target, rows=16)
    packed, scale = every_code_and_scale()
    words = words_for(plan, packed, scale)
    expected = decode_official(packed, scale).T  # [512, 128]
    for group in range(0, 16, 1 if interpreter == "interpret" else 7):
        inputs = np.eye(512, dtype=np.float32)[32 * group : 32 * group + 16]
        found = product(plan, inputs, words, interpreter)
        np.testing.assert_array_equal(found, expected[32 * group : 32 * group + 16])


def test_decoding_to_float32_is_exact() -> None:
    packed, scale = every_code_and_scale()
    found = decode_mxfp4(*(jnp.asarray(words) for words in pack_mxfp4(packed, scale, planar=True)))
    np.testing.assert_array_equal(found, decode_official(packed, scale).T)


@pytest.mark.parametrize("activations", ["bfloat16", "float32"])
@pytest.mark.parametrize("k", [32, 96, 192, 256, 288, 768])
@pytest.mark.parametrize("target", ONE_OF_EACH)
def test_sums_are_exact_products_added_in_float32(target: str, k: int, activations: str) -> None:
    packed, scale = random_matrix(k, LANES, k)
    weights = decode_official(packed, scale).T.astype(np.float64)
    for rows in (1, 3, 8):
        plan = plan_for(target, rows, activations=activations)
        x = np.random.default_rng(rows).normal(size=(plan.expert_rows, k)).astype(np.float32)
        x = np.asarray(jnp.asarray(x, activations).astype(jnp.float32))
        found = product(plan, x, words_for(plan, packed, scale))
        additions = 3 * (k + 8)  # float32 activations may come in three pieces
        bound = additions * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(weights))
        assert (np.abs(found - x.astype(np.float64) @ weights) <= bound).all()


@pytest.mark.parametrize("target", [name for name in ONE_OF_EACH if name != "cpu"])
def test_a_row_gives_equal_bits_in_any_company_and_place(target: str) -> None:
    packed, scale = random_matrix(1, LANES, 448)
    x = np.random.default_rng(2).normal(size=(16, 448)).astype(np.float32)
    alone = [product(plan_for(target), x[row : row + 1], words_for(plan_for(target), packed, scale)) for row in (0, 5)]
    for rows in ROWS[1:]:
        plan = plan_for(target, rows)
        for row, expected in zip((0, 5), alone, strict=True):
            for place in {0, rows - 1}:
                company = np.roll(x, place - row, axis=0)[: plan.expert_rows]
                found = product(plan, company, words_for(plan, packed, scale))
                np.testing.assert_array_equal(found[place], expected[0])


# ---- a whole expert ----


def expert_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    latent, inner, weights = config.routed_expert_hidden_size, config.moe_intermediate_size, {}
    for layer in range(config.num_hidden_layers):
        for expert in range(config.num_experts):
            for i, (matrix, out, k) in enumerate((("w1", inner, latent), ("w3", inner, latent), ("w2", latent, inner))):
                stem = expert_name(layer, expert, matrix)  # type: ignore[arg-type]
                packed, scale = random_matrix(seed + 3 * expert + i, out, k, 118, 124)
                weights |= {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scale}
    return weights


@functools.cache
def compiled_expert(plan: Plan) -> Any:
    def kernel(x: Any, gate_up: Any, down: Any, out: Any) -> None:
        out[...] = expert_output(plan, expert_hidden(plan, x[...], gate_up[...]), gate_up[...], down[...])

    def run(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((len(x), down.shape[1]), jnp.float32)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x, gate_up, down)

    return jax.jit(run)


def expected_with_bound(
    plan: Plan, x: np.ndarray, w1: np.ndarray, w3: np.ndarray, w2: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The expert in float64 and how far float32 sums and the activation format's roundings may lead from it.

    SiTU's slope is at most 1.23 times the other factor in the gate and at most the soft gate in the up value.
    """
    config = plan.config
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-9 + 2.0**-16}[plan.activations]
    sums = 3 * (x.shape[1] + 8) * 2.0**-24
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    gate, up = x @ w1, x @ w3
    gate_error = sums * (np.abs(x) @ np.abs(w1)) + unit * np.abs(gate)
    up_error = sums * (np.abs(x) @ np.abs(w3)) + unit * np.abs(up)
    soft_gate = beta * np.tanh(gate / beta) / (1 + np.exp(-gate))
    hidden = soft_gate * linear_beta * np.tanh(up / linear_beta)
    hidden_error = 1.23 * gate_error * (np.abs(up) + up_error) + np.abs(soft_gate) * up_error
    hidden_error += (unit + 64 * 2.0**-24) * (np.abs(hidden) + hidden_error)
    out = hidden @ w2
    error = (hidden_error + sums * np.abs(hidden)) @ np.abs(w2)
    return out, error + unit * (np.abs(out) + error)


@pytest.mark.parametrize("activations", ["bfloat16", "float32"])
@pytest.mark.parametrize(("latent", "inner"), [(128, 64), (384, 96), (640, 192), (256, 160)])
@pytest.mark.parametrize("target", ONE_OF_EACH)
def test_an_expert_from_the_bank_against_float64(target: str, latent: int, inner: int, activations: str) -> None:
    """Widths whose parts end inside a tile; down with more lanes than gate and up together, and with fewer."""
    config = dataclasses.replace(SMALL, routed_expert_hidden_size=latent, moe_intermediate_size=inner)
    assert config.expert_format == "mxfp4"
    weights = expert_weights(config, latent)
    for rows in (1, 4, 5):
        plan = plan_for(target, rows, config, activations)
        arrays = {name: weight_buffers(plan)[name] for name in ("bank_in", "bank_out")}
        bank_in, bank_out = (np.zeros(array.shape, np.uint32) for array in arrays.values())
        layer = next(i for i in range(config.num_hidden_layers) if config.is_moe(i))
        pack_experts(plan, weights, layer, range(config.num_experts), 0, bank_in, bank_out)
        x = np.random.default_rng(rows).normal(size=(plan.expert_rows, latent))
        x = np.asarray(jnp.asarray(x, activations).astype(jnp.float32)).astype(np.float64)
        for expert in (0, 3):
            stems = [expert_name(layer, expert, matrix) for matrix in ("w1", "w3", "w2")]
            matrices = (
                decode_official(weights[f"{s}.weight_packed"], weights[f"{s}.weight_scale"]).T.astype(np.float64)
                for s in stems
            )
            expected, bound = expected_with_bound(plan, x, *matrices)
            found = np.asarray(compiled_expert(plan)(x.astype(np.float32), bank_in[expert], bank_out[expert]))
            assert (np.abs(found[:, :latent] - expected) <= bound).all()
            assert not found[:, latent:].any()


@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16])
def test_an_expert_of_kimi_k3_wastes_little_memory(parts: int) -> None:
    """Bytes in HBM, tiles and all, against 4 bits a weight and 8 bits for 32 of them."""
    config = ModelConfig.preset("kimi-k3")
    plan = dataclasses.replace(plan_for("v7x"), config=config, split=Split(config, parts))
    weights = 3 * config.moe_intermediate_size // parts * config.routed_expert_hidden_size
    padded = sum(weight_buffers(plan)[name].padded_bytes for name in ("bank_in", "bank_out"))
    assert padded == plan.expert_bytes * plan.moe_layers * config.num_experts
    assert plan.expert_bytes <= 1.03 * 4.25 / 8 * weights
