"""Gated multi-head latent attention without rotation, absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The cache holds one latent and one shared extra key a position; queries are carried into the latent space, so a page of
the cache serves every head as keys and as values.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megakernel.control import when
from megakernel.limits import MAX_ROWS
from megakernel.memory import COUNT, POSITION
from megakernel.phases.linear import rounded, whole_tiles
from megakernel.phases.mix import rms_norm
from megakernel.plan import Plan
from megakernel.program import LANES, round_up
from megakernel.stream import LatentPages, Ref, Scalar, quotient, tile_start


def store_fresh_latents(plan: Plan, latent: jax.Array, extra: jax.Array, norm: jax.Array, fresh: Ref) -> None:
    """This round's cache entries, rounded.  # [rows, kv_lora], [rows, extra] -> fresh [rows, latent_lanes] f32"""
    config = plan.config
    split = round_up(config.kv_lora_rank, LANES)
    fresh[...] = jnp.zeros(fresh.shape, fresh.dtype)
    fresh[:, : config.kv_lora_rank] = rounded(plan, rms_norm(latent, norm, config.mla_latent_norm_eps))
    fresh[:, split : split + config.qk_rope_head_dim] = extra


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
    rows = plan.product_rows
    queries[...] = jnp.zeros(queries.shape, queries.dtype)
    for head in range(plan.split.heads):
        extra = matrix.offset(f"extra{head}")
        latent = slice(head * stride, head * stride + config.kv_lora_rank)
        queries[:rows, head, : config.kv_lora_rank] = absorbed[:rows, latent]
        width = config.qk_rope_head_dim
        queries[:rows, head, split : split + width] = query[:rows, extra : extra + width]


def merge_into_groups(plan: Plan, fresh: Ref, positions: list[Scalar], counts: list[Scalar], groups: Ref) -> None:
    """Puts each sequence's new latents at their places in the cache tiles that were read for it."""
    for sequence, (position, count) in enumerate(zip(positions, counts, strict=True)):
        first = tile_start(position)
        groups[sequence] = merge_fresh(plan, groups[sequence], first, fresh, sequence, position, count)


def merge_fresh(
    plan: Plan, entries: jax.Array, first: Scalar, fresh: Ref, sequence: Scalar | int, position: Scalar, count: Scalar
) -> jax.Array:
    """`entries` of the positions from `first` on, with this round's own in their places.

    Args:
      entries: [positions, latent_lanes]; fresh: [rows, latent_lanes] f32.
      position: of the sequence's first row; count: its rows.
    """
    at = first + lax.broadcasted_iota(jnp.int32, (entries.shape[0], 1), 0)
    for t in range(plan.tokens):
        row = fresh[pl.ds(t * plan.sequences + sequence, 1)].astype(entries.dtype)
        entries = jnp.where((at == position + t) & (t < count), row, entries)
    return entries


Place = tuple[Scalar, Scalar]
"""Sequence and page: pages are read sequence after sequence."""


def start_pages(plan: Plan, layer: Scalar, current: Ref, pages: LatentPages) -> Place:
    """Fetches the first pages of a layer, as many as there are windows; returns the place of the page after them."""

    def start(order: Scalar, place: Place) -> Place:
        pages.start(order, layer, *place)
        return _next_place(plan, current, place)

    first = (jnp.int32(0), jnp.int32(0))
    return lax.fori_loop(0, jnp.minimum(pages.in_flight, _all_pages(plan, current)), start, first)


def _page_count(plan: Plan, current: Ref, sequence: Scalar | int) -> Scalar:
    position, count = current[POSITION, sequence], current[COUNT, sequence]
    return quotient(position + jnp.maximum(count, 1) - 1, plan.page) + 1


def _all_pages(plan: Plan, current: Ref) -> Scalar:
    return functools.reduce(jnp.add, (_page_count(plan, current, sequence) for sequence in range(plan.sequences)))


def _next_place(plan: Plan, current: Ref, place: Place) -> Place:
    """After the last page, a place that means nothing."""
    sequence, page = place
    is_last = page + 1 == _page_count(plan, current, jnp.minimum(sequence, plan.sequences - 1))
    return jnp.where(is_last, sequence + 1, sequence), jnp.where(is_last, 0, page + 1)


def attend(
    plan: Plan, layer: Scalar, current: Ref, queries: Ref, fresh: Ref, pages: LatentPages, ahead: Place, contexts: Ref
) -> None:
    """Softmax attention of every row over its sequence's past and itself, page by page.

    A row meets the same pages in the same order, in a tile of the same shape, however many rows share the round: the
    round's own latents are put into the pages before use, and what a row must not see weighs exactly zero.

    Args:
      layer: index among the MLA layers.
      current: [.., sequences] i32 (SMEM), see `megakernel.memory`.
      queries: [rows, heads, latent_lanes] f32; fresh: [rows, latent_lanes] f32.
      ahead: what `start_pages` returned.
      contexts: [rows, heads, kv_lora] f32, receives the attention-weighted latents.
    """
    heads, tokens, sequences = plan.split.heads, plan.tokens, plan.sequences
    scale = plan.config.qk_head_dim**-0.5

    all_pages = _all_pages(plan, current)

    def sequence_attention(sequence: Scalar, carry: tuple[Scalar, Place]) -> tuple[Scalar, Place]:
        before, ahead = carry  # pages of the sequences before, and the next one to fetch
        position, count = current[POSITION, sequence], current[COUNT, sequence]
        page_count = _page_count(plan, current, sequence)
        rows = [queries[t * sequences + sequence] for t in range(tokens)]
        stacked = whole_tiles(rows, MAX_ROWS).astype(plan.activations)  # [tiles * MAX_ROWS, latent_lanes]
        query = jnp.split(stacked, len(stacked) // MAX_ROWS)
        last = jnp.split(position + _row_token(plan, len(stacked)), len(query))  # the last position that a row sees

        def page(i: Scalar, carry: tuple[list[Softmax], Place]) -> tuple[list[Softmax], Place]:
            states, ahead = carry
            entries = pages.take(before + i, layer, sequence, i)
            first = i * plan.page

            @when(first + plan.page > position)
            def merge() -> None:
                entries[...] = merge_fresh(plan, entries[...], first, fresh, sequence, position, count)

            at = first + lax.broadcasted_iota(jnp.int32, (1, plan.page), 1)
            tiles = zip(states, query, last, strict=True)
            keys, values = entries[...], entries[:, : plan.config.kv_lora_rank]
            states = [accumulate(state, q, keys, values, at <= seen, scale) for state, q, seen in tiles]
            order = before + i + pages.in_flight

            @when(order < all_pages)
            def start_next() -> None:
                pages.start(order, layer, *ahead)

            return states, _next_place(plan, current, ahead)

        lowest = jnp.full((MAX_ROWS, 1), -jnp.inf, jnp.float32)
        nothing = jnp.zeros((MAX_ROWS, plan.config.kv_lora_rank), jnp.float32)
        start = [(lowest, jnp.zeros_like(lowest), nothing)] * len(query)
        states, ahead = lax.fori_loop(0, page_count, page, (start, ahead))
        context = jnp.concatenate([context / total for _, total, context in states], axis=0)
        for t in range(tokens):
            contexts[t * sequences + sequence] = context[t * heads : (t + 1) * heads]
        return before + page_count, ahead

    lax.fori_loop(0, sequences, sequence_attention, (jnp.int32(0), ahead))


def _row_token(plan: Plan, rows: int) -> jax.Array:
    """Which token of its sequence each row of a stacked query is.  # [rows, 1] i32"""
    return lax.div(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), jnp.int32(plan.split.heads))


Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Running maximum [m, 1], sum of exponentials [m, 1] and weighted values [m, n], all f32."""


def accumulate(
    state: Softmax, query: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array, scale: float
) -> Softmax:
    """Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over some more entries; only `seen` ones count.

    Args:
      query: [m, d]; keys: [entries, d]; values: [entries, n], all in the activation format.
      seen: [m or 1, entries] bool.
    """
    highest, total, context = state
    scores = jnp.where(seen, _product(query, keys, contract=1) * scale, -jnp.inf)  # [m, entries]
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
    shrink = jnp.exp(highest - new_highest)
    shares = jnp.exp(scores - new_highest)
    context = context * shrink + _product(shares.astype(values.dtype), values, contract=0)
    return new_highest, total * shrink + jnp.sum(shares, axis=-1, keepdims=True), context


def _product(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    numbers = (((1,), (contract,)), ((), ()))
    return lax.dot_general(x, y, numbers, precision=precision, preferred_element_type=jnp.float32)


def attention_output(plan: Plan, values: Ref, gate: jax.Array | None) -> jax.Array:
    """Heads side by side, times sigmoid(gate).  # values [rows, heads * group width] f32 -> [rows, heads * v] f32"""
    config = plan.config
    stride = plan.group_width(plan.matrices["mla_value"])
    rows, dim = plan.product_rows, config.v_head_dim
    heads = [values[:rows, h * stride : h * stride + dim] for h in range(plan.split.heads)]
    out = rounded(plan, whole_tiles([jnp.concatenate(heads, axis=-1)], plan.rows))
    return out if gate is None else rounded(plan, out * rounded(plan, jax.nn.sigmoid(gate)))
