"""Logit bias and penalties: what one row's raw logits become before temperature and filters, in greedy decoding too.

`token_counts` holds for every sequence and vocabulary entry whether the entry stands in the prompt and how often in the
output so far, in one number: `IN_PROMPT` + `ONE_OUTPUT` times the count. Drafts of a round count as output for their
own row and the rows behind it, because that is what they are if they are accepted: they are counted while such a row
is chosen, and taken back. So a row sees the counts that plain decoding would have there, in whatever order and on
whatever core rows are chosen. Only plans with `penalties` hold any of this.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax

from megakernel.memory import GIVEN, TAKEN
from megakernel.plan import Plan
from megakernel.stream import Ref, Scalar
from megakernel.vocabulary import for_pieces, tile_of

REPETITION, PRESENCE, FREQUENCY = range(3, 6)
"""Lanes of the `sampling_floats` request, behind those of `phases.sample`."""
IN_PROMPT, ONE_OUTPUT = 1, 2


@dataclasses.dataclass(frozen=True)
class RowPenalties:
    """What one sequence asked for; all scalars."""

    repetition: Scalar
    presence: Scalar
    frequency: Scalar

    @classmethod
    def of(cls, floats: Ref, sequence: Scalar | int) -> RowPenalties:
        """Reads the requests of one sequence from SMEM."""
        return cls(*(floats[sequence, lane] for lane in (REPETITION, PRESENCE, FREQUENCY)))


def adjust(refs: SimpleNamespace, sequence: Scalar | int) -> Ref:
    """Writes `row_logits` with bias and penalties of a sequence to `scaled_logits`, and returns it.

    The bias is added; then the logits of tokens of prompt and output are divided by the repetition penalty if they are
    positive, else multiplied; then frequency and presence penalties of tokens of the output are subtracted.
    """
    asked, adjusted = RowPenalties.of(refs.sampling_floats, sequence), refs.scaled_logits

    def piece(columns: Any, _: None) -> None:
        x = refs.row_logits[:, columns] + refs.logit_bias[sequence, :, columns]
        count = refs.token_counts[sequence, :, columns]
        times = lax.shift_right_logical(count, 1).astype(jnp.float32)
        x = jnp.where(count > 0, jnp.where(x > 0.0, x / asked.repetition, x * asked.repetition), x)
        x = x - asked.frequency * times
        adjusted[:, columns] = x - jnp.where(times > 0.0, asked.presence, 0.0)

    for_pieces(adjusted.shape, piece)
    return adjusted


def count_drafts(plan: Plan, refs: SimpleNamespace, sequence: Scalar, t: Scalar, amount: int) -> None:
    """Adds `amount` to the count of every draft of a sequence up to row `t` of the round.

    A row holds a draft if it is neither the anchor nor a given token.
    """
    given, taken = refs.request[sequence, GIVEN], refs.status[sequence, TAKEN]

    def one(u: Scalar, _: None) -> None:
        count_token(refs, sequence, refs.window[u * plan.sequences + sequence], amount)

    lax.fori_loop(jnp.maximum(given - taken, 1), t + 1, one, None)


def settle_counts(plan: Plan, refs: SimpleNamespace, sequence: Scalar, emitted: Scalar) -> None:
    """Counts the new ones of the `emitted` tokens that a round has taken the sequence on by."""
    before = refs.status[sequence, TAKEN] - emitted

    def one(t: Scalar, _: None) -> None:
        count_token(refs, sequence, refs.row_tokens[t * plan.sequences + sequence], ONE_OUTPUT)

    lax.fori_loop(jnp.maximum(refs.request[sequence, GIVEN] - before - 1, 0), emitted, one, None)


def count_token(refs: SimpleNamespace, sequence: Scalar | int, token: Scalar, amount: Scalar | int) -> None:
    """Adds to the count of one token."""
    columns, here = tile_of(refs.token_counts.shape[1:], token)
    tile = refs.token_counts[sequence, :, columns]
    refs.token_counts[sequence, :, columns] = tile + jnp.where(here, amount, 0)
