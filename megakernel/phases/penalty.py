"""Logit bias and penalties: what one row's raw logits become before temperature and filters, in greedy decoding too.

`token_counts` holds for every sequence and vocabulary entry whether the entry stands in the prompt and how often in the
output so far, in one number: `IN_PROMPT` + `ONE_OUTPUT` times the count. Drafts of a round count as output for the rows
behind them, because that is what they are if they are accepted; what was refused is taken back after the round. So a
row sees the counts that plain decoding would have there. Only plans with `penalties` hold any of this.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jax import lax

from megakernel.memory import COUNT, GIVEN, TAKEN, TOKEN
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


def adjust(refs: SimpleNamespace, sequence: Scalar) -> Ref:
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


def count_draft(plan: Plan, refs: SimpleNamespace, sequence: Scalar, t: Scalar) -> None:
    """Counts the token in row `t` of a round for this row and those behind it, if it is a draft."""
    row = t * plan.sequences + sequence
    _count(refs, sequence, refs.window[row], _is_draft(refs, sequence, t, refs.status[sequence, TAKEN]))


def settle_counts(plan: Plan, refs: SimpleNamespace, sequence: Scalar, emitted: Scalar) -> None:
    """After `emitted` tokens of a round were accepted: takes refused drafts back, and counts the last new token."""
    taken = refs.status[sequence, TAKEN]

    def take_back(t: Scalar, _: None) -> None:
        refused = _is_draft(refs, sequence, t, taken - emitted) & (t < refs.current[COUNT, sequence])
        _count(refs, sequence, refs.window[t * plan.sequences + sequence], refused, -ONE_OUTPUT)

    lax.fori_loop(jnp.maximum(emitted, 1), plan.tokens, take_back, None)
    is_new = (emitted > 0) & (taken >= refs.request[sequence, GIVEN])
    _count(refs, sequence, refs.current[TOKEN, sequence], is_new)


def _is_draft(refs: SimpleNamespace, sequence: Scalar, t: Scalar, taken: Scalar) -> Scalar:
    """Whether row `t` of a round that began with `taken` tokens holds a draft: neither the anchor nor a given token."""
    return (t > 0) & (taken + t >= refs.request[sequence, GIVEN])


def count_token(refs: SimpleNamespace, sequence: Scalar, token: Scalar, amount: Scalar | int) -> None:
    """Adds to the count of one token."""
    columns, here = tile_of(refs.token_counts.shape[1:], token)
    tile = refs.token_counts[sequence, :, columns]
    refs.token_counts[sequence, :, columns] = tile + jnp.where(here, amount, 0)


def _count(refs: SimpleNamespace, sequence: Scalar, token: Scalar, condition: Scalar, amount: int = ONE_OUTPUT) -> None:
    count_token(refs, sequence, token, jnp.where(condition, amount, 0))
