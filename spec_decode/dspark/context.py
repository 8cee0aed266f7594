"""Context of the drafter: keys and values of every position that the target has run.

ctx = RMSNorm(fc . taps; hidden_norm); per draft layer K = RoPE(RMSNorm_head(W_k ctx; k_norm)), V = W_v ctx.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megakernel.layers import Step
from megakernel.memory import COMMIT, POSITION
from megakernel.phases import mla
from megakernel.phases.linear import rounded
from megakernel.phases.mix import rms_norm
from megakernel.program import LANES, round_up
from megakernel.stream import LatentGroups, Scalar
from spec_decode.dspark.config import DSparkConfig


def cache_lanes(config: DSparkConfig) -> int:
    """Lanes of one cached position: the keys of all KV heads, then their values, each padded to whole lanes."""
    return 2 * value_lane(config)


def value_lane(config: DSparkConfig) -> int:
    return round_up(config.num_kv_heads * config.head_dim, LANES)


def vector_rows(config: DSparkConfig) -> dict[str, int]:
    """Row of each small vector in the drafter's table."""
    names = ["hidden_norm", "norm", "rope"]
    for layer in range(config.num_layers):
        names += [f"{name}{layer}" for name in ("input_norm", "ffn_norm", "q_norm", "k_norm")]
    return {name: row for row, name in enumerate(names)}


def vector_of(config: DSparkConfig, weights: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name == "rope":
        half = np.arange(config.head_dim // 2, dtype=np.float64) * 2 / config.head_dim
        return np.tile(config.rope_theta**-half, 2).astype(np.float32)
    tensors = {"hidden_norm": "hidden_norm.weight", "norm": "norm.weight"}
    for layer in range(config.num_layers):
        tensors |= {
            f"input_norm{layer}": f"layers.{layer}.input_layernorm.weight",
            f"ffn_norm{layer}": f"layers.{layer}.post_attention_layernorm.weight",
            f"q_norm{layer}": f"layers.{layer}.self_attn.q_norm.weight",
            f"k_norm{layer}": f"layers.{layer}.self_attn.k_norm.weight",
        }
    return np.asarray(weights[tensors[name]], np.float32)


def vector(config: DSparkConfig, step: Step, name: str, width: int) -> jax.Array:
    """[1, width] f32"""
    row = vector_rows(config)[name]
    return step.refs.draft_vectors[row : row + 1, :width]


def norm(config: DSparkConfig, step: Step, x: jax.Array, name: str) -> jax.Array:
    return rounded(step.plan, rms_norm(x, vector(config, step, name, x.shape[1]), config.rms_norm_eps))


def rotate(config: DSparkConfig, step: Step, x: jax.Array, positions: jax.Array) -> jax.Array:
    """RoPE, half-split (arXiv 2104.09864).  # x [rows, dim] f32, positions [rows, 1] i32"""
    half = config.head_dim // 2
    angle = positions.astype(jnp.float32) * vector(config, step, "rope", config.head_dim)
    swapped = jnp.concatenate([-x[:, half:], x[:, :half]], axis=-1)
    return x * jnp.cos(angle) + swapped * jnp.sin(angle)


def heads_of(x: jax.Array, dim: int) -> list[jax.Array]:
    """[rows, heads * dim] -> heads of [rows, dim]"""
    return [x[:, start : start + dim] for start in range(0, x.shape[1], dim)]


def normed_heads(config: DSparkConfig, step: Step, x: jax.Array, name: str, positions: jax.Array) -> list[jax.Array]:
    """Head by head: RMS norm, then RoPE."""
    return [
        rounded(step.plan, rotate(config, step, norm(config, step, head, name), positions))
        for head in heads_of(x, config.head_dim)
    ]


def store_keys_values(config: DSparkConfig, keys: list[jax.Array], values: jax.Array, out: Any) -> None:
    """Lays keys and values of rows out as the cache holds them.  # out [rows, cache_lanes] f32"""
    out[...] = jnp.zeros(out.shape, out.dtype)
    for head, key in enumerate(keys):
        out[:, head * config.head_dim : (head + 1) * config.head_dim] = key
    out[:, value_lane(config) : value_lane(config) + values.shape[1]] = values


def store_context(config: DSparkConfig, step: Step, section: Scalar) -> None:
    """Keys and values of the round's rows into the cache; rows that were not accepted are left out."""
    plan, refs = step.plan, step.refs
    taps = jnp.concatenate([refs.taps[i] for i in range(len(config.tap_layers))], axis=-1)
    out = step.linear(section, taps, "draft_fc")
    features = norm(config, step, step.take(out, "draft_fc", "features"), "hidden_norm")
    out = step.linear(section, features, "draft_context")

    # `current` already stands behind the accepted rows.
    counts = step.all_current(COMMIT)
    firsts = [now - count for now, count in zip(step.all_current(POSITION), counts, strict=True)]
    positions = step.row_column(lambda t, sequence: firsts[sequence] + t)
    groups = _groups(step)
    for layer in range(config.num_layers):
        keys = normed_heads(config, step, step.take(out, "draft_context", f"k{layer}"), f"k_norm{layer}", positions)
        store_keys_values(config, keys, step.take(out, "draft_context", f"v{layer}"), refs.draft_fresh)
        groups.start_read(jnp.int32(layer), firsts, jnp.bool_(False))
        groups.wait_read(jnp.int32(layer), firsts)
        mla.merge_into_groups(plan, refs.draft_fresh, firsts, counts, refs.draft_group)
        groups.start_write(jnp.int32(layer), firsts)
        groups.drain()


def _groups(step: Step) -> LatentGroups:
    refs = step.refs
    return LatentGroups(step.plan, refs.draft_keys_values, refs.draft_group, refs.draft_group_in, refs.draft_group_out)
