"""Left to right through the block: each slot's logits get a bias from the token before it, then it picks its token.

d_k = choose(base_k + markov_w2 . markov_w1[prev]). The choice is the target's own rule, with the target's noise at that
position: where drafter and target agree on the distribution, they agree on the token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.layers import Step
from megakernel.memory import POSITION, TOKEN
from megakernel.phases import sample
from megakernel.phases.linear import dot, whole_tiles, widened
from megakernel.plan import POSITION_GROUP
from megakernel.stream import EmbeddingRows, Scalar
from spec_decode.dspark.config import DSparkConfig


def draft_left_to_right(config: DSparkConfig, step: Step) -> None:
    """Writes `drafts[k * sequences + s]` for every slot k."""
    plan, refs = step.plan, step.refs
    sequences = plan.sequences
    previous = step.all_current(TOKEN)
    positions = step.all_current(POSITION)
    samplings = [sample.RowSampling.of(refs.sampling_floats, refs.sampling_ints, s) for s in range(sequences)]
    for slot in range(plan.tokens - 1):
        bias = _bias(step, previous)
        for sequence in range(sequences):
            row = slot * sequences + sequence
            logits = sample.masked_logits(plan, refs.out_draft_head[row : row + 1] + bias[sequence : sequence + 1])
            token = sample.choose_token(logits, refs.draft_scaled, samplings[sequence], positions[sequence] + slot + 1)
            token = jnp.minimum(token, config.vocab_size - 1)
            refs.drafts[row] = token
            previous[sequence] = token


def _bias(step: Step, previous: list[Scalar]) -> jax.Array:
    """Row s is the bias of sequence s.  # [at least sequences, vocabulary lanes] f32"""
    plan, refs = step.plan, step.refs
    EmbeddingRows(plan, refs.draft_markov_w1, refs.draft_markov_rows, refs.draft_done).fetch(previous)
    at = lax.broadcasted_iota(jnp.int32, (POSITION_GROUP, 1), 0)
    found = []
    for sequence, token in enumerate(previous):
        group = widened(refs.draft_markov_rows[sequence])
        found.append(jnp.sum(jnp.where(at == lax.rem(token, POSITION_GROUP), group, 0.0), axis=0, keepdims=True))
    rows = max(plan.sequences, plan.target.min_product_rows)
    rank = refs.draft_markov_out.shape[0]
    return dot(plan, whole_tiles(found, rows)[:, :rank].astype(plan.activations), refs.draft_markov_out[...])
