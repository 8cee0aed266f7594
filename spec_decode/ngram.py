"""Prompt lookup: the continuation of the last place where the latest tokens stood before.

(Saxena, "Prompt Lookup Decoding", 2023.) No weights: it pays where text repeats itself, as in code and summaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megakernel.drafting import Weightless
from megakernel.layers import Step
from megakernel.memory import COMMIT, DRAFTS, POSITION, Buffer
from megakernel.plan import Plan
from megakernel.program import LANES, round_up

_LENGTHS = 3
"""Longest n-gram looked up."""
_UNKNOWN = -1


@dataclasses.dataclass(frozen=True)
class NGramDrafter(Weightless):
    """Looks the latest 3, else 2 tokens up in prompt and output so far; the longest, then the latest match wins."""

    shortest: int = 2
    name: str = "ngram"
    max_drafts: int = 15
    taps: tuple[int, ...] = ()

    def vmem(self, plan: Plan) -> dict[str, Buffer]:
        return {"ngram_history": _history(plan)}

    def request(self, plan: Plan) -> dict[str, Buffer]:
        return {"ngram_known": _history(plan)}

    def fill_request(self, plan: Plan, slot: int, known: list[int], arrays: Mapping[str, np.ndarray]) -> None:
        history = arrays["ngram_known"][slot]
        history[:] = _UNKNOWN
        for back in range(_LENGTHS):
            history[back, back : back + len(known)] = known[: history.shape[1] - back]

    def begin(self, step: Step) -> None:
        step.refs.ngram_history[...] = step.refs.ngram_known[...]

    def propose(self, step: Step, section: Any) -> None:
        def one(sequence: jax.Array, _: None) -> None:
            _append(step, sequence)
            _look_up(step, sequence, self.shortest)

        lax.fori_loop(0, step.plan.sequences, one, None)


def _history(plan: Plan) -> Buffer:
    """Row b holds, at lane i, the token b places before position i."""
    return Buffer((plan.sequences, _LENGTHS, round_up(plan.context + plan.tokens, LANES)), "int32")


def _append(step: Step, sequence: jax.Array) -> None:
    """Writes the tokens that the round has emitted."""
    plan, refs = step.plan, step.refs
    emitted, last = refs.current[COMMIT, sequence], refs.current[POSITION, sequence]
    history = refs.ngram_history[sequence]  # [lengths, lanes]
    lane = lax.broadcasted_iota(jnp.int32, history.shape, 1)
    back = lax.broadcasted_iota(jnp.int32, history.shape, 0)
    for t in range(plan.tokens):
        here = (lane - back == last - emitted + 1 + t) & (t < emitted)
        history = jnp.where(here, refs.row_tokens[t * plan.sequences + sequence], history)
    refs.ngram_history[sequence] = history


def _look_up(step: Step, sequence: jax.Array, shortest: int) -> None:
    plan, refs = step.plan, step.refs
    last = refs.current[POSITION, sequence]
    history = refs.ngram_history[sequence]
    lane = lax.broadcasted_iota(jnp.int32, (1, history.shape[1]), 1)
    matches, length = lane < last, jnp.zeros_like(lane)
    for back in range(_LENGTHS):
        row = history[back : back + 1]
        latest = jnp.max(jnp.where(lane == last, row, _UNKNOWN))  # the token `back` places before the anchor
        matches &= (row == latest) & (latest >= 0)
        length += matches.astype(jnp.int32)
    score = jnp.where(length >= shortest, length * history.shape[1] + lane, -1)
    best = jnp.max(score)
    found = lax.rem(jnp.maximum(best, 0), history.shape[1])
    count = jnp.where(best >= 0, jnp.minimum(last - found, plan.tokens - 1), 0)
    for k in range(plan.tokens - 1):
        token = jnp.max(jnp.where(lane == found + 1 + k, history[:1], _UNKNOWN))
        refs.drafts[k * plan.sequences + sequence] = jnp.maximum(token, 0)
    refs.current[DRAFTS, sequence] = count
