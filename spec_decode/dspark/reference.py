"""The DSpark drafter in plain JAX: oracle of the kernel, and what training differentiates.

    params = drafter_params(config, tensors, jnp.float32, embeddings=(embed_tokens, lm_head))
    ctx = context_features(params, config, taps)                   # of every position the target has run
    keys, values = context_kv(params, config, ctx, positions)      # computed once a position, then kept
    drafts, logits = draft(params, config, anchor, position, keys, values, positions)

A round: the anchor is the newest token, at position p, which the target has not run yet. It and `block_size - 1` mask
tokens form a block of slots at positions p, p + 1, ...; slot k predicts the token at position p + k + 1. All slots go
through few attention layers at once; then a Markov head chains them from left to right: the logits of slot k get a
bias that depends on the token chosen in slot k - 1.

Functions take one sequence and one block (`jax.vmap` gives more): T context rows, S slots, D hidden, H query heads, G
key-value heads, E numbers a head, V vocabulary. Rounding follows the dtype of the parameters, as in the model.
Source: the public checkpoint of the Kimi K3 speculator and the code of `speculators`.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from model.primitives import Trace, einsum_f32, linear, linear_f32, rms_norm, rounded, swi_glu
from spec_decode.dspark.config import DSparkConfig, dspark_specs

Params = Mapping[str, jax.Array]
"""Arrays by checkpoint name, `embed_tokens.weight` and `lm_head.weight` among them in any case."""

Embeddings = tuple[ArrayLike, ArrayLike]


def drafter_params(
    config: DSparkConfig, tensors: Mapping[str, np.ndarray], dtype: DTypeLike, embeddings: Embeddings | None = None
) -> dict[str, jax.Array]:
    """Parameters of `dtype` from the tensors of a checkpoint.

    Args:
      config: the drafter's configuration.
      tensors: the names of `dspark_specs(config)`.
      dtype: of parameters and activations; float32 or bfloat16.
      embeddings: the target's `embed_tokens` and `lm_head` `[V, D]` (the same array twice if they are tied); needed if
        and only if `config.shares_embeddings`.
    """
    params = {name: jnp.asarray(tensors[name], dtype) for name in dspark_specs(config)}
    if config.shares_embeddings != (embeddings is not None):
        needed = "needs the target's embeddings" if config.shares_embeddings else "has embeddings of its own"
        raise ValueError(f"embeddings: drafter {config.name!r} {needed}")
    if embeddings is not None:
        expected = (config.vocab_size, config.hidden_size)
        for name, table in zip(("embed_tokens.weight", "lm_head.weight"), embeddings, strict=True):
            params[name] = jnp.asarray(table, dtype)
            if params[name].shape != expected:
                raise ValueError(
                    f"embeddings: {name} of the target has shape {params[name].shape}; expected {expected}"
                )
    return params


def target_taps(config: DSparkConfig, trace: Trace) -> jax.Array:
    """The drafter's input from a forward pass of the target with `trace`: `[..., taps * target_hidden_size]`.

    A tap is the running sum of the residual stream after that many completed layers, not the mixture that the next
    sublayer reads.
    """
    return jnp.concatenate([trace["prefix_sum"][layers - 1] for layers in config.tap_layers], axis=-1)


# Context


def context_features(params: Params, config: DSparkConfig, taps: jax.Array) -> jax.Array:
    """`taps [T, taps * target_hidden_size]` to `[T, D]`, the same for every draft layer."""
    projected = linear(taps.astype(params["fc.weight"].dtype), params["fc.weight"])
    return rms_norm(projected, params["hidden_norm.weight"], config.rms_norm_eps)


def context_kv(
    params: Params, config: DSparkConfig, features: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of context positions in every layer: `features [T, D]`, `positions [T]`; two `[layers, T, G, E]`.

    The features go into the projections as they are: the layer's input norm is for the block alone.
    """
    layers = [keys_and_values(params, config, layer, features, positions) for layer in range(config.num_layers)]
    return jnp.stack([keys for keys, _ in layers]), jnp.stack([values for _, values in layers])


def keys_and_values(
    params: Params, config: DSparkConfig, layer: int, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`x [T, D]` to rotated keys and to values of one layer, `[T, G, E]` each."""
    prefix = f"layers.{layer}.self_attn"
    keys = _by_head(linear(x, params[f"{prefix}.k_proj.weight"]), config)
    keys = rms_norm(keys, params[f"{prefix}.k_norm.weight"], config.rms_norm_eps)
    values = _by_head(linear(x, params[f"{prefix}.v_proj.weight"]), config)
    return rotate(keys, positions, config.rope_theta), values


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary positions, half-split: number i turns with number i + E/2; `x [T, heads, E]`, `positions [T]`."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return rounded(jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), x.dtype)


# Block


def block_tokens(config: DSparkConfig, anchor: jax.Array) -> jax.Array:
    """The anchor and masks, `[S]`."""
    return jnp.full((config.block_size,), config.mask_token_id, jnp.int32).at[0].set(anchor)


def block_hidden(
    params: Params,
    config: DSparkConfig,
    anchor: jax.Array,
    position: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """One pass of a block through all layers.

    Args:
      params: the drafter.
      config: its configuration.
      anchor: the newest token, a scalar.
      position: its position p, a scalar.
      keys: `[layers, T, G, E]`, from `context_kv`.
      values: `[layers, T, G, E]`.
      positions: `[T]`, the position of each context row in any order; negative for a row that holds none. Rows at p or
        after it, left over from rejected drafts, are not seen.

    Returns:
      `[S, D]`, normed: slot k predicts position p + k + 1.
    """
    slots = position + jnp.arange(config.block_size)
    sees_context = context_mask(positions, position, config.sliding_window)
    sees_block = block_mask(config.block_size)
    x = params["embed_tokens.weight"][block_tokens(config, anchor)]
    for layer in range(config.num_layers):
        prefix, eps = f"layers.{layer}", config.rms_norm_eps
        h = rms_norm(x, params[f"{prefix}.input_layernorm.weight"], eps)
        queries = _by_head(linear(h, params[f"{prefix}.self_attn.q_proj.weight"]), config)
        queries = rms_norm(queries, params[f"{prefix}.self_attn.q_norm.weight"], eps)
        queries = rotate(queries, slots, config.rope_theta)
        own_keys, own_values = keys_and_values(params, config, layer, h, slots)
        mixed = attend(queries, (keys[layer], own_keys), (values[layer], own_values), (sees_context[None], sees_block))
        x = rounded(x + linear(mixed, params[f"{prefix}.self_attn.o_proj.weight"]), x.dtype)
        h = rms_norm(x, params[f"{prefix}.post_attention_layernorm.weight"], eps)
        gate, up = (linear(h, params[f"{prefix}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = rounded(x + linear(swi_glu(gate, up), params[f"{prefix}.mlp.down_proj.weight"]), x.dtype)
    return rms_norm(x, params["norm.weight"], config.rms_norm_eps)


def context_mask(positions: jax.Array, position: jax.Array, window: int) -> jax.Array:
    """Which context rows a block at `position` sees, the same for all its slots: p - window <= t < p. `[T]`."""
    return (positions >= 0) & (positions >= position - window) & (positions < position)


def block_mask(slots: int) -> jax.Array:
    """Which slots a slot sees: itself and those before it. `[S, S]`, query first."""
    return jnp.tril(jnp.ones((slots, slots), bool))


def attend(
    queries: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    values: tuple[jax.Array, jax.Array],
    visible: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """One softmax over context and block, which are never joined: many blocks can share one context.

    `queries [S, H, E]`; context and block: keys and values `[rows, G, E]`, `visible [S or 1, rows]`; `[S, H * E]`.
    Query head h uses key-value head h // (H / G).
    """
    slots, heads, width = queries.shape
    grouped = queries.reshape(slots, keys[0].shape[1], -1, width)
    scores = [
        jnp.where(sees[:, None, None, :], einsum_f32("sgqe,tge->sgqt", grouped, k) * width**-0.5, -jnp.inf)
        for k, sees in zip(keys, visible, strict=True)
    ]
    weights = rounded(jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1), queries.dtype)
    context_rows = keys[0].shape[0]
    parts = weights[..., :context_rows], weights[..., context_rows:]
    mixed = sum(einsum_f32("sgqt,tge->sgqe", w, v) for w, v in zip(parts, values, strict=True))
    return rounded(jnp.asarray(mixed), queries.dtype).reshape(slots, heads * width)


# Heads


def base_logits(params: Params, hidden: jax.Array) -> jax.Array:
    """`hidden [..., D]` to float32 `[..., V]`, before the Markov bias."""
    return linear_f32(hidden, params["lm_head.weight"])


def markov_bias(params: Params, previous: jax.Array) -> jax.Array:
    """What the token before says of the next one: `previous [...]` to float32 `[..., V]`."""
    return linear_f32(params["markov_head.markov_w1.weight"][previous], params["markov_head.markov_w2.weight"])


def markov_chain(params: Params, base: jax.Array, anchor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best token of each slot, left to right: `base [S, V]` to drafts `[S]` and logits with bias `[S, V]`."""

    def slot(previous: jax.Array, row: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logits = row + markov_bias(params, previous)
        best = jnp.argmax(logits).astype(jnp.int32)
        return best, (best, logits)

    _, (drafts, logits) = lax.scan(slot, jnp.asarray(anchor, jnp.int32), base)
    return drafts, logits


def confidence(params: Params, hidden: jax.Array, previous: jax.Array) -> jax.Array:
    """Score of a slot, `sigmoid` of which estimates that its draft is accepted: `hidden [..., D]`, the token before
    it `[...]`; `[...]` float32."""
    both = jnp.concatenate([hidden, params["markov_head.markov_w1.weight"][previous]], axis=-1)
    score = linear_f32(both, params["confidence_head.proj.weight"])[..., 0]
    return score + params["confidence_head.proj.bias"].astype(jnp.float32)


def draft(
    params: Params,
    config: DSparkConfig,
    anchor: jax.Array,
    position: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One round: `block_size` drafts `[S]`, of positions p + 1 and on, and their logits `[S, V]` float32.

    The arguments are those of `block_hidden`.
    """
    hidden = block_hidden(params, config, anchor, position, keys, values, positions)
    return markov_chain(params, base_logits(params, hidden), anchor)


def _by_head(x: jax.Array, config: DSparkConfig) -> jax.Array:
    return x.reshape(x.shape[0], -1, config.head_dim)
