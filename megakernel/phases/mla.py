"""Gated multi-head latent attention without rotation, absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The cache holds one latent and one shared extra key a position; queries are carried into the latent space, so a page of
the cache serves every head as keys and as values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.control import when
from megakernel.phases.linear import rounded
from megakernel.phases.mix import rms_norm
from megakernel.plan import POSITION_GROUP, Plan
from megakernel.program import LANES, round_up
from megakernel.stream import LatentPages, Ref, Scalar, quotient


def store_fresh_latents(plan: Plan, latent: jax.Array, extra: jax.Array, norm: jax.Array, fresh: Ref) -> None:
    """This step's cache entries.  # latent [rows, kv_lora], extra [rows, extra] f32 -> fresh [rows, latent_lanes]"""
    config = plan.config
    split = round_up(config.kv_lora_rank, LANES)
    fresh[...] = jnp.zeros(fresh.shape, fresh.dtype)
    fresh[:, : config.kv_lora_rank] = rms_norm(latent, norm, config.mla_latent_norm_eps).astype(fresh.dtype)
    fresh[:, split : split + config.qk_rope_head_dim] = extra.astype(fresh.dtype)


def store_queries(plan: Plan, absorbed: Ref, query: Ref, queries: Ref) -> None:
    """Gathers each head's absorbed query and extra query beside each other, as `fresh` lays them out.

    Args:
      absorbed: [rows, heads * group width] f32, output of the product `mla_absorb`.
      query: [rows, ...] f32, columns named as in the product that made the queries.
      queries: [rows, heads, latent_lanes] f32.
    """
    config = plan.config
    matrix = plan.matrices["mla_in" if config.q_lora_rank is None else "mla_query"]
    stride, split = plan.group_width(plan.matrices["mla_absorb"]), round_up(config.kv_lora_rank, LANES)
    queries[...] = jnp.zeros(queries.shape, queries.dtype)
    for head in range(config.num_attention_heads):
        extra = matrix.offset(f"extra{head}")
        queries[:, head, : config.kv_lora_rank] = absorbed[:, head * stride :][:, : config.kv_lora_rank]
        queries[:, head, split : split + config.qk_rope_head_dim] = query[:, extra : extra + config.qk_rope_head_dim]


def merge_into_groups(plan: Plan, fresh: Ref, positions: list[Scalar], groups: Ref) -> None:
    """Puts each sequence's new latent at its place in the cache tile that was read for it."""
    for sequence, position in enumerate(positions):
        at = lax.broadcasted_iota(jnp.int32, (POSITION_GROUP, 1), 0)
        here = at == lax.rem(position, POSITION_GROUP)
        groups[sequence] = jnp.where(here, fresh[sequence : sequence + 1, :], groups[sequence])


def attend(
    plan: Plan, layer: Scalar, current: Ref, queries: Ref, fresh: Ref, pages: LatentPages, contexts: Ref
) -> None:
    """Softmax attention of every sequence over its cached past and its own new position, page by page.

    Args:
      layer: index among the MLA layers.
      current: [3, sequences] i32 (SMEM); its second row says how many positions of each sequence the cache holds.
      queries: [rows, heads, latent_lanes] f32; fresh: [rows, latent_lanes].
      contexts: [rows, heads, kv_lora] f32, receives the attention-weighted latents.
    """

    def sequence_attention(sequence: Scalar, _: None) -> None:
        length = current[1, sequence]
        page_count = quotient(length + plan.page - 1, plan.page)

        @when(page_count > 0)
        def start_first() -> None:
            pages.start(layer, sequence, jnp.int32(0))

        query = queries[sequence].astype(plan.activations)  # [heads, latent_lanes]
        state = _own_position(plan, query, fresh, sequence)

        def page(i: Scalar, state: _Softmax) -> _Softmax:
            @when(i + 1 < page_count)
            def start_next() -> None:
                pages.start(layer, sequence, i + 1)

            entries = pages.take(layer, sequence, i)[...]  # [page, latent_lanes]
            at = i * plan.page + lax.broadcasted_iota(jnp.int32, (1, plan.page), 1)
            return _accumulate(plan, state, query, entries, at < length)

        _, total, context = lax.fori_loop(0, page_count, page, state)
        contexts[sequence] = context / total

    lax.fori_loop(0, plan.sequences, sequence_attention, None)


_Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum [heads, 1], sum of exponentials [heads, 1] and weighted latents [heads, kv_lora], all f32."""


def _own_position(plan: Plan, query: jax.Array, fresh: Ref, sequence: Scalar) -> _Softmax:
    heads = plan.config.num_attention_heads
    lowest = jnp.full((heads, 1), -jnp.inf, jnp.float32)
    nothing = jnp.zeros((heads, plan.config.kv_lora_rank), jnp.float32)
    own = lax.broadcasted_iota(jnp.int32, (1, plan.rows), 1) == sequence
    own_row = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0) == sequence
    entries = jnp.where(own_row, fresh[...], jnp.zeros((), fresh.dtype))  # other rows may hold anything, even NaN
    return _accumulate(plan, (lowest, jnp.zeros_like(lowest), nothing), query, entries, own)


def _accumulate(plan: Plan, state: _Softmax, query: jax.Array, entries: jax.Array, seen: jax.Array) -> _Softmax:
    """Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over one page of entries; only `seen` ones count."""
    highest, total, context = state
    scores = _product(query, entries, contract=1) * plan.config.qk_head_dim**-0.5  # [heads, entries]
    scores = jnp.where(seen, scores, -jnp.inf)
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
    shrink = jnp.exp(highest - new_highest)
    shares = jnp.exp(scores - new_highest)
    values = entries[:, : plan.config.kv_lora_rank]
    context = context * shrink + _product(shares.astype(plan.activations), values, contract=0)
    return new_highest, total * shrink + jnp.sum(shares, axis=-1, keepdims=True), context


def _product(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    numbers = (((1,), (contract,)), ((), ()))
    return lax.dot_general(x, y, numbers, precision=precision, preferred_element_type=jnp.float32)


def attention_output(plan: Plan, values: Ref, gate: jax.Array | None) -> jax.Array:
    """Heads side by side, times sigmoid(gate).  # values [rows, heads * group width] f32 -> [rows, heads * v] f32"""
    config = plan.config
    stride = plan.group_width(plan.matrices["mla_value"])
    heads = [values[:, h * stride : h * stride + config.v_head_dim] for h in range(config.num_attention_heads)]
    out = rounded(plan, jnp.concatenate(heads, axis=-1))
    return out if gate is None else rounded(plan, out * rounded(plan, jax.nn.sigmoid(gate)))
