"""Context of the drafter: keys and values of every position that the target has run.

ctx = RMSNorm(fc . taps; hidden_norm); per draft layer K = RoPE(RMSNorm_head(W_k ctx; k_norm)), V = W_v ctx.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from megakernel.cores import Piece
from megakernel.layers import Step
from megakernel.memory import COMMIT, POSITION
from megakernel.phases import mla
from megakernel.phases.linear import rounded
from megakernel.phases.mix import rms_norm
from megakernel.stream import LatentGroups, Ref, Scalar
from spec_decode.dspark.config import DSparkConfig
from spec_decode.dspark.share import Share

Turn = tuple[jax.Array, jax.Array]
"""Cosine and sine of every row's rotation, [rows, head lanes] f32 each."""


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
    """[1, width] f32, zero beyond the vector"""
    row = vector_rows(config)[name]
    return step.refs.draft_vectors[row : row + 1, :width]


def norm(config: DSparkConfig, step: Step, x: jax.Array, name: str) -> jax.Array:
    return rounded(step.plan, rms_norm(x, vector(config, step, name, x.shape[1]), config.rms_norm_eps))


def turn_of(share: Share, step: Step, positions: jax.Array) -> Turn:
    """RoPE of rows at `positions` [rows, 1] i32; lanes beyond a head's dimension do not turn."""
    angle = positions.astype(jnp.float32) * vector(share.config, step, "rope", share.head_lanes)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(share: Share, x: jax.Array, turn: Turn) -> jax.Array:
    """RoPE, half-split (arXiv 2104.09864).  # x [rows, head lanes] f32"""
    half, (cos, sin) = share.config.head_dim // 2, turn
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    swapped = jnp.where(lane < half, -pltpu.roll(x, x.shape[1] - half, 1), pltpu.roll(x, half, 1))
    return x * cos + swapped * sin


def heads_of(share: Share, step: Step, out: Ref, matrix: str, column: str) -> list[jax.Array]:
    """The heads of a product's column, rounded, zero beyond their dimension.  # [rows, head lanes] f32 each"""
    found, dim = step.plan.matrices[matrix], share.config.head_dim
    width, first = next(c.width for c in found.columns if c.name == column), found.offset(column)
    heads = [rounded(step.plan, step.rows_of(out, start, dim)) for start in range(first, first + width, dim)]
    missing = share.head_lanes - dim
    return [jnp.pad(head, ((0, 0), (0, missing))) if missing else head for head in heads]


def normed_heads(share: Share, step: Step, heads: list[jax.Array], name: str, turn: Turn) -> list[jax.Array]:
    """Head by head: RMS norm, then RoPE."""
    config = share.config
    weight = vector(config, step, name, share.head_lanes)
    normed = []
    for x in heads:
        spread = jnp.sum(x * x, axis=-1, keepdims=True) / config.head_dim
        x = rounded(step.plan, x * lax.rsqrt(spread + config.rms_norm_eps) * weight)
        normed.append(rounded(step.plan, rotate(share, x, turn)))
    return normed


def store_keys_values(share: Share, keys: list[jax.Array], values: list[jax.Array], out: Any) -> None:
    """Lays keys and values of rows out as the cache holds them.  # out [rows, cache lanes] f32"""
    for place, head in enumerate([*keys, *values]):
        out[:, place * share.head_lanes : (place + 1) * share.head_lanes] = head


def store_context(share: Share, step: Step, section: Scalar) -> None:
    """Keys and values of the round's rows into the cache; rows that were not accepted are left out."""
    plan, refs, config = step.plan, step.refs, share.config
    taps = jnp.concatenate([refs.taps[i] for i in range(len(config.tap_layers))], axis=-1)
    out = step.linear(section, taps, "draft_fc")
    step.cores.start_gather([Piece(step.take(out, "draft_fc", "features"), config.hidden_size)])

    # `current` already stands behind the accepted rows.
    counts = step.all_current(COMMIT)
    firsts = [now - count for now, count in zip(step.all_current(POSITION), counts, strict=True)]
    turn = turn_of(share, step, step.row_column(lambda t, sequence: firsts[sequence] + t))
    groups = _groups(step)
    (features,) = step.cores.finish_gather()
    features = norm(config, step, features[:, : config.hidden_size], "hidden_norm")
    out = step.linear(section, features, "draft_context")
    for layer in range(config.num_layers):
        keys, values = (heads_of(share, step, out, "draft_context", f"{part}{layer}") for part in "kv")
        keys = normed_heads(share, step, keys, f"k_norm{layer}", turn)
        store_keys_values(share, keys, values, refs.draft_fresh)
        groups.start_read(jnp.int32(layer), firsts, jnp.bool_(False))
        groups.wait_read(jnp.int32(layer), firsts)
        mla.merge_into_groups(plan, refs.draft_fresh, firsts, counts, refs.draft_group)
        groups.start_write(jnp.int32(layer), firsts)
        groups.drain()


def _groups(step: Step) -> LatentGroups:
    refs = step.refs
    return LatentGroups(step.plan, refs.draft_keys_values, refs.draft_group, refs.draft_group_in, refs.draft_group_out)
