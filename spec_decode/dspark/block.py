"""One parallel pass over the block: anchor and mask tokens, causal among themselves, over the cached context."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megakernel.control import when
from megakernel.cores import Piece
from megakernel.layers import Step
from megakernel.limits import MAX_ROWS, POSITION_GROUP
from megakernel.memory import POSITION, TOKEN
from megakernel.phases import mla
from megakernel.phases.linear import rounded, whole_tiles, widened
from megakernel.phases.mla import Softmax
from megakernel.program import LANES
from megakernel.stream import EmbeddingRows, LatentPages, Scalar, quotient
from megakernel.wire import one_tile
from spec_decode.dspark.context import Turn, heads_of, norm, normed_heads, store_keys_values, turn_of
from spec_decode.dspark.share import Share


def run_block(share: Share, step: Step, section: Scalar) -> None:
    """Leaves the base logits of every slot in `out_draft_head`; row k * sequences + s is slot k of sequence s."""
    _embed_block(share, step)
    turn = turn_of(share, step, step.row_column(lambda slot, sequence: step.current(POSITION, sequence) + slot))
    for layer in range(share.config.num_layers):
        _attention(share, step, section, layer, turn)
        _ffn(share, step, section, layer)
    step.linear(section, norm(share.config, step, step.refs.draft_stream[...], "norm"), "draft_head")


def _embed_block(share: Share, step: Step) -> None:
    plan, refs = step.plan, step.refs
    tokens = [*step.all_current(TOKEN), jnp.int32(share.config.mask_token_id)]
    EmbeddingRows(plan, refs.draft_embedding, refs.draft_embedding_rows, refs.draft_done).fetch(tokens)
    at = lax.broadcasted_iota(jnp.int32, (POSITION_GROUP, 1), 0)
    rows = []
    for i, token in enumerate(tokens):
        group = widened(refs.draft_embedding_rows[i])  # [POSITION_GROUP, own hidden]
        rows.append(jnp.sum(jnp.where(at == lax.rem(token, POSITION_GROUP), group, 0.0), axis=0, keepdims=True))
    *anchors, mask = rows
    row = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    own = jnp.broadcast_to(mask, (plan.rows, share.hidden))
    for sequence, anchor in enumerate(anchors):
        own = jnp.where(row == sequence, anchor, own)
    step.cores.start_gather([Piece(own, share.config.hidden_size)])
    (stream,) = step.cores.finish_gather()
    refs.draft_stream[...] = stream[:, : share.config.hidden_size]


def _add_to_stream(step: Step, matrix: str) -> None:
    """Adds what all cores' outputs of `matrix` sum to."""
    refs = step.refs
    step.cores.start_total(step.take_unrounded(refs.out_draft_out, matrix, "out"))
    refs.draft_stream[...] = rounded(step.plan, refs.draft_stream[...] + step.cores.finish_total())


def _attention(share: Share, step: Step, section: Scalar, layer: int, turn: Turn) -> None:
    plan, refs, name = step.plan, step.refs, f"draft{layer}_in"
    out = step.linear(section, norm(share.config, step, refs.draft_stream[...], f"input_norm{layer}"), name)
    queries, keys, values = (heads_of(share, step, out, name, part) for part in "qkv")
    store_keys_values(share, normed_heads(share, step, keys, f"k_norm{layer}", turn), values, refs.draft_block)
    for head, query in enumerate(normed_heads(share, step, queries, f"q_norm{layer}", turn)):
        refs.draft_queries[:, head] = query
    lax.fori_loop(0, plan.sequences, lambda sequence, _: _attend(share, step, layer, sequence), None)
    read = _side_by_side(share, [refs.draft_read[:, head] for head in range(share.heads)])
    step.linear(section, rounded(plan, read), f"draft{layer}_out")
    _add_to_stream(step, f"draft{layer}_out")


def _side_by_side(share: Share, heads: list[jax.Array]) -> jax.Array:
    """Heads without the padding between them.  # [rows, head lanes] f32 each -> [rows, heads * dim] f32"""
    dim = share.config.head_dim
    if LANES % dim:
        return jnp.concatenate([head[:, :dim] for head in heads], axis=-1)
    size = LANES // dim
    tiles = [one_tile(heads[first : first + size], dim) for first in range(0, len(heads), size)]
    return jnp.concatenate(tiles, axis=-1)[:, : len(heads) * dim]


def _ffn(share: Share, step: Step, section: Scalar, layer: int) -> None:
    plan, refs, name = step.plan, step.refs, f"draft{layer}_gate_up"
    out = step.linear(section, norm(share.config, step, refs.draft_stream[...], f"ffn_norm{layer}"), name)
    gate, up = (step.take(out, name, part) for part in ("gate", "up"))
    step.linear(section, rounded(plan, gate * jax.nn.sigmoid(gate) * up), f"draft{layer}_down")
    _add_to_stream(step, f"draft{layer}_down")


def _attend(share: Share, step: Step, layer: int, sequence: Scalar) -> None:
    """Every slot of one sequence: the context rows of its window, then the block up to itself."""
    plan, refs = step.plan, step.refs
    slots, per_kv = plan.tokens - 1, share.readers
    pages = LatentPages(plan, refs.draft_keys_values, refs.draft_page, refs.draft_page_done)
    anchor = refs.current[POSITION, sequence]
    lowest = jnp.maximum(anchor - share.config.sliding_window, 0)
    first_page = quotient(lowest, plan.page)
    page_count = quotient(anchor + plan.page - 1, plan.page)
    queries = [_stacked_queries(share, step, sequence, kv, slots) for kv in range(share.kv_heads)]

    @when(first_page < page_count)
    def start_first() -> None:
        pages.start(first_page, jnp.int32(layer), sequence, first_page)

    def page(i: Scalar, states: list[Softmax]) -> list[Softmax]:
        @when(i + 1 < page_count)
        def start_next() -> None:
            pages.start(i + 1, jnp.int32(layer), sequence, i + 1)

        entries = pages.take(i, jnp.int32(layer), sequence, i)[...]  # [page, cache lanes]
        at = i * plan.page + lax.broadcasted_iota(jnp.int32, (1, plan.page), 1)
        seen = (at >= lowest) & (at < anchor)
        return [_see(share, states[kv], queries[kv], entries, kv, seen) for kv in range(share.kv_heads)]

    rows = len(queries[0])
    start = (jnp.full((rows, 1), -1e30), jnp.zeros((rows, 1)), jnp.zeros((rows, share.head_lanes)))
    states = lax.fori_loop(first_page, page_count, page, [start] * share.kv_heads)
    own = [refs.draft_block[pl.ds(slot * plan.sequences + sequence, 1)] for slot in range(slots)]
    entries = whole_tiles(own, MAX_ROWS).astype(plan.activations)  # [whole tiles, cache lanes]
    slot_of_row = lax.div(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), jnp.int32(per_kv))
    causal = lax.broadcasted_iota(jnp.int32, (1, len(entries)), 1) <= slot_of_row
    for kv in range(share.kv_heads):
        _, total, read = _see(share, states[kv], queries[kv], entries, kv, causal)
        read = read / total
        for slot in range(slots):
            for head in range(per_kv):
                row = slot * per_kv + head
                target = slot * plan.sequences + sequence
                refs.draft_read[target, kv * per_kv + head : kv * per_kv + head + 1] = read[row : row + 1]


def _stacked_queries(share: Share, step: Step, sequence: Scalar, kv: int, slots: int) -> jax.Array:
    """The query heads that share a KV head, slot after slot.  # [whole tiles, head lanes]"""
    plan, per_kv = step.plan, share.readers
    rows = [
        step.refs.draft_queries[slot * plan.sequences + sequence][kv * per_kv : (kv + 1) * per_kv]
        for slot in range(slots)
    ]
    return whole_tiles(rows, MAX_ROWS).astype(plan.activations)


def _see(share: Share, state: Softmax, query: jax.Array, entries: jax.Array, kv: int, seen: jax.Array) -> Softmax:
    at = slice(kv * share.head_lanes, (kv + 1) * share.head_lanes)
    keys, values = entries[:, at], entries[:, share.value_lane :][:, at]
    return mla.accumulate(state, query, keys, values, seen, share.config.head_dim**-0.5)
