"""Left to right through the block: each slot's logits get a bias from the token before it, then it picks its token.

d_k = choose(base_k + markov_w2 . markov_w1[prev]). The choice is the target's own rule, with the target's noise at that
position: where drafter and target agree on the distribution, they agree on the token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megakernel.layers import Step
from megakernel.limits import POSITION_GROUP
from megakernel.memory import POSITION, TOKEN
from megakernel.phases import penalty, sample
from megakernel.phases.linear import dot, whole_tiles, widened
from megakernel.program import LANES, round_up
from megakernel.stream import EmbeddingRows, Scalar
from megakernel.vocabulary import PIECE_REGISTERS, for_columns
from spec_decode.dspark import shared_choice
from spec_decode.dspark.config import DSparkConfig


def draft_left_to_right(config: DSparkConfig, step: Step) -> None:
    """Writes `drafts[k * sequences + s]` for every slot k."""
    plan, refs = step.plan, step.refs
    scratch = sample.Scratch(refs.scaled_logits, refs.logit_mass)

    def one_slot(slot: Scalar, _: None) -> None:
        _add_bias(step, slot)
        if plan.split.cores > 1:
            shared_choice.choose_slot(config, step, slot)
        else:
            lax.fori_loop(0, plan.sequences, functools.partial(one, slot), None)

    def one(slot: Scalar, sequence: Scalar, _: None) -> None:
        row = slot * plan.sequences + sequence
        sample.load_logits(refs.out_draft_head, row, refs.row_logits, config.vocab_size)
        sampling = sample.RowSampling.of(refs.sampling_floats, refs.sampling_ints, sequence)
        position = refs.current[POSITION, sequence] + slot + 1
        logits = penalty.adjust(refs, sequence) if plan.penalties else refs.row_logits
        token = sample.choose_token(logits, scratch, sampling, position)
        refs.drafts[row] = jnp.minimum(token, config.vocab_size - 1)
        if plan.penalties:
            penalty.count_token(refs, sequence, refs.drafts[row], penalty.ONE_OUTPUT)

    def take_back(row: Scalar, _: None) -> None:
        sequence = lax.rem(row, jnp.int32(plan.sequences))
        penalty.count_token(refs, sequence, refs.drafts[row], -penalty.ONE_OUTPUT)

    lax.fori_loop(0, plan.tokens - 1, one_slot, None)
    if plan.penalties:
        lax.fori_loop(0, (plan.tokens - 1) * plan.sequences, take_back, None)


def _token_before(step: Step, slot: Scalar, sequence: int) -> Scalar:
    before = jnp.maximum(slot - 1, 0) * step.plan.sequences + sequence
    return jnp.where(slot > 0, step.refs.drafts[before], step.current(TOKEN, sequence))


def _add_bias(step: Step, slot: Scalar) -> None:
    """Adds to the base logits of a slot what the token before it says, in pieces of the vocabulary."""
    plan, refs = step.plan, step.refs
    previous = [_token_before(step, slot, sequence) for sequence in range(plan.sequences)]
    EmbeddingRows(plan, refs.draft_markov_w1, refs.draft_markov_rows, refs.draft_done).fetch(previous)
    at = lax.broadcasted_iota(jnp.int32, (POSITION_GROUP, 1), 0)
    found = []
    for sequence, token in enumerate(previous):
        group = widened(refs.draft_markov_rows[sequence])
        found.append(jnp.sum(jnp.where(at == lax.rem(token, POSITION_GROUP), group, 0.0), axis=0, keepdims=True))
    rows = max(plan.sequences, plan.target.min_product_rows)
    rank, lanes = refs.draft_markov_out.shape
    operand = whole_tiles(found, rows)[:, :rank].astype(plan.activations)

    def add(columns: Any, _: None) -> None:
        bias = dot(plan, operand, refs.draft_markov_out[:, columns])  # [at least sequences, columns] f32
        for sequence in range(plan.sequences):
            row = pl.ds(slot * plan.sequences + sequence, 1)
            refs.out_draft_head[row, columns] += bias[sequence : sequence + 1]

    for_columns(lanes, _piece(lanes, rows), add)


def _piece(lanes: int, rows: int) -> int:
    """Lanes of equal pieces whose product with `rows` rows stays within a piece's registers."""
    most, tiles = max(1, PIECE_REGISTERS * 8 // round_up(rows, 8)), lanes // LANES
    return LANES * max(count for count in range(1, tiles + 1) if tiles % count == 0 and count <= most)
