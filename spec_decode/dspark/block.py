"""One parallel pass over the block: anchor and mask tokens, causal among themselves, over the cached context."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megakernel.control import when
from megakernel.layers import Step
from megakernel.memory import POSITION, TOKEN
from megakernel.phases import mla
from megakernel.phases.linear import rounded, whole_tiles, widened
from megakernel.phases.mla import Softmax
from megakernel.plan import MAX_ROWS, POSITION_GROUP
from megakernel.stream import EmbeddingRows, LatentPages, Scalar, quotient
from spec_decode.dspark.config import DSparkConfig
from spec_decode.dspark.context import norm, normed_heads, store_keys_values, value_lane


def run_block(config: DSparkConfig, step: Step, section: Scalar) -> None:
    """Leaves the base logits of every slot in `out_draft_head`; row k * sequences + s is slot k of sequence s."""
    refs = step.refs
    _embed_block(config, step)
    positions = step.row_column(lambda slot, sequence: step.current(POSITION, sequence) + slot)
    for layer in range(config.num_layers):
        _attention(config, step, section, layer, positions)
        _ffn(config, step, section, layer)
    step.linear(section, norm(config, step, refs.draft_stream[...], "norm"), "draft_head")


def _embed_block(config: DSparkConfig, step: Step) -> None:
    plan, refs = step.plan, step.refs
    tokens = [*step.all_current(TOKEN), jnp.int32(config.mask_token_id)]
    EmbeddingRows(plan, refs.draft_embedding, refs.draft_embedding_rows, refs.draft_done).fetch(tokens)
    at = lax.broadcasted_iota(jnp.int32, (POSITION_GROUP, 1), 0)
    rows = []
    for i, token in enumerate(tokens):
        group = widened(refs.draft_embedding_rows[i])
        rows.append(jnp.sum(jnp.where(at == lax.rem(token, POSITION_GROUP), group, 0.0), axis=0, keepdims=True))
    *anchors, mask = rows
    refs.draft_stream[...] = jnp.broadcast_to(mask, refs.draft_stream.shape)
    for sequence, anchor in enumerate(anchors):
        refs.draft_stream[sequence : sequence + 1] = anchor


def _attention(config: DSparkConfig, step: Step, section: Scalar, layer: int, positions: jax.Array) -> None:
    plan, refs, name = step.plan, step.refs, f"draft{layer}"
    x = norm(config, step, refs.draft_stream[...], f"input_norm{layer}")
    out = step.linear(section, x, f"{name}_in")
    keys = normed_heads(config, step, step.take(out, f"{name}_in", "k"), f"k_norm{layer}", positions)
    store_keys_values(config, keys, step.take(out, f"{name}_in", "v"), refs.draft_block)
    queries = normed_heads(config, step, step.take(out, f"{name}_in", "q"), f"q_norm{layer}", positions)
    for head, query in enumerate(queries):
        refs.draft_queries[:, head] = query
    lax.fori_loop(0, plan.sequences, lambda sequence, _: _attend(config, step, layer, sequence), None)
    read = jnp.concatenate([refs.draft_read[:, head] for head in range(config.num_heads)], axis=-1)
    out = step.linear(section, rounded(plan, read), f"{name}_out")
    refs.draft_stream[...] = rounded(plan, refs.draft_stream[...] + step.take(out, f"{name}_out", "out"))


def _ffn(config: DSparkConfig, step: Step, section: Scalar, layer: int) -> None:
    plan, refs, name = step.plan, step.refs, f"draft{layer}"
    x = norm(config, step, refs.draft_stream[...], f"ffn_norm{layer}")
    out = step.linear(section, x, f"{name}_gate_up")
    gate, up = step.take(out, f"{name}_gate_up", "gate"), step.take(out, f"{name}_gate_up", "up")
    out = step.linear(section, rounded(plan, gate * jax.nn.sigmoid(gate) * up), f"{name}_down")
    refs.draft_stream[...] = rounded(plan, refs.draft_stream[...] + step.take(out, f"{name}_down", "out"))


def _attend(config: DSparkConfig, step: Step, layer: int, sequence: Scalar) -> None:
    """Every slot of one sequence: the context rows of its window, then the block up to itself."""
    plan, refs = step.plan, step.refs
    slots, per_kv = plan.tokens - 1, config.num_heads // config.num_kv_heads
    pages = LatentPages(plan, refs.draft_keys_values, refs.draft_page, refs.draft_page_done)
    anchor = refs.current[POSITION, sequence]
    lowest = jnp.maximum(anchor - config.sliding_window, 0)
    first_page = quotient(lowest, plan.page)
    page_count = quotient(anchor + plan.page - 1, plan.page)
    queries = [_stacked_queries(config, step, sequence, kv, slots) for kv in range(config.num_kv_heads)]

    @when(first_page < page_count)
    def start_first() -> None:
        pages.start(jnp.int32(layer), sequence, first_page)

    def page(i: Scalar, states: list[Softmax]) -> list[Softmax]:
        @when(i + 1 < page_count)
        def start_next() -> None:
            pages.start(jnp.int32(layer), sequence, i + 1)

        entries = pages.take(jnp.int32(layer), sequence, i)[...]  # [page, cache lanes]
        at = i * plan.page + lax.broadcasted_iota(jnp.int32, (1, plan.page), 1)
        seen = (at >= lowest) & (at < anchor)
        return [_see(config, states[kv], queries[kv], entries, kv, seen) for kv in range(config.num_kv_heads)]

    rows = len(queries[0])
    start = (jnp.full((rows, 1), -1e30), jnp.zeros((rows, 1)), jnp.zeros((rows, config.head_dim)))
    states = lax.fori_loop(first_page, page_count, page, [start] * config.num_kv_heads)
    own = [refs.draft_block[pl.ds(slot * plan.sequences + sequence, 1)] for slot in range(slots)]
    entries = whole_tiles(own, MAX_ROWS).astype(plan.activations)  # [whole tiles, cache lanes]
    slot_of_row = lax.div(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), jnp.int32(per_kv))
    causal = lax.broadcasted_iota(jnp.int32, (1, len(entries)), 1) <= slot_of_row
    for kv in range(config.num_kv_heads):
        _, total, read = _see(config, states[kv], queries[kv], entries, kv, causal)
        read = read / total
        for slot in range(slots):
            for head in range(per_kv):
                row = slot * per_kv + head
                target = slot * plan.sequences + sequence
                refs.draft_read[target, kv * per_kv + head : kv * per_kv + head + 1] = read[row : row + 1]


def _stacked_queries(config: DSparkConfig, step: Step, sequence: Scalar, kv: int, slots: int) -> jax.Array:
    """The query heads that share a KV head, slot after slot, scaled.  # [whole tiles, dim]"""
    plan, per_kv = step.plan, config.num_heads // config.num_kv_heads
    rows = [
        step.refs.draft_queries[slot * plan.sequences + sequence][kv * per_kv : (kv + 1) * per_kv]
        for slot in range(slots)
    ]
    return whole_tiles(rows, MAX_ROWS).astype(plan.activations)


def _see(
    config: DSparkConfig, state: Softmax, query: jax.Array, entries: jax.Array, kv: int, seen: jax.Array
) -> Softmax:
    at = slice(kv * config.head_dim, (kv + 1) * config.head_dim)
    keys, values = entries[:, at], entries[:, value_lane(config) :][:, at]
    return mla.accumulate(state, query, keys, values, seen, config.head_dim**-0.5)
