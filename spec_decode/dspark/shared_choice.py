"""The draft of a slot when the vocabulary is divided over cores: the best of every core's best.

Bias, penalties, temperature and noise are those of the target's own choice. But min-p, top-k and top-p are left out:
they need the whole vocabulary in one place, and a draft that they would have dropped is only rejected by the target.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from megakernel.control import when
from megakernel.cores import ManyCores
from megakernel.layers import Step, column
from megakernel.memory import POSITION
from megakernel.phases import penalty, sample
from megakernel.program import LANES
from megakernel.shared_rows import scalar_of
from megakernel.stream import Ref, Scalar
from megakernel.vocabulary import SEGMENTS, entries, for_pieces, highest, lowest_entry
from megakernel.wire import statistic, statistics
from spec_decode.dspark.config import DSparkConfig

_LOWEST = -3e38
"""Travels in place of minus infinity, which a shard past the vocabulary has at its best."""


def choose_slot(config: DSparkConfig, step: Step, slot: Scalar) -> None:
    """Writes `drafts[slot * sequences + s]`, the same on every core; equal logits go to the lowest entry."""
    plan, refs = step.plan, step.refs
    assert isinstance(step.cores, ManyCores)
    exchange = step.cores.pieces
    own = [_best_of_shard(config, step, slot, sequence) for sequence in range(plan.sequences)]
    values, tokens = (column(list(found), plan.wire_rows) for found in zip(*own, strict=True))
    exchange.start_gather(statistics(values, tokens.astype(jnp.float32)))  # entries below 2 ** 24 are exact
    (pieces,) = exchange.finish()
    best, token = _best(pieces, 0)
    for core in range(1, plan.split.cores):
        value, entry = _best(pieces, core)
        best, token = jnp.where(value > best, value, best), jnp.where(value > best, entry, token)
    for sequence in range(plan.sequences):
        chosen = scalar_of(token, sequence).astype(jnp.int32)
        chosen = jnp.minimum(chosen, config.vocab_size - 1)
        refs.drafts[slot * plan.sequences + sequence] = chosen
        if plan.penalties:
            penalty.count_token(refs, sequence, chosen, penalty.ONE_OUTPUT)


def _best(pieces: Ref, core: int) -> tuple[jax.Array, jax.Array]:
    """What a core found for every sequence: value and entry.  # [rows, 1] f32 each"""
    piece = pieces[core, :, :LANES].astype(jnp.float32)
    return statistic(piece, 0), statistic(piece, 1)


def _best_of_shard(config: DSparkConfig, step: Step, slot: Scalar, sequence: int) -> tuple[Scalar, Scalar]:
    """The highest of this core's logits, disturbed if the draft is drawn, and its entry.  # [] f32, [] i32"""
    plan, refs = step.plan, step.refs
    assert isinstance(step.cores, ManyCores)
    first = step.cores.me * plan.split.vocabulary
    shard = _own_segments(step)
    logits = shard.row_logits
    row = slot * plan.sequences + sequence
    sample.load_logits(refs.out_draft_head, row, logits, config.vocab_size - first)
    if plan.penalties:
        logits = penalty.adjust(shard, sequence)
    sampling = sample.RowSampling.of(refs.sampling_floats, refs.sampling_ints, sequence)
    position = refs.current[POSITION, sequence] + slot + 1

    @when(sampling.temperature > 0.0)
    def disturb() -> None:
        def add_noise(columns: Any, _: None) -> None:
            noise = sample.noise(sampling, position, first + entries(logits.shape, columns))
            logits[:, columns] = logits[:, columns] / sampling.temperature + noise

        for_pieces(logits.shape, add_noise)

    best = highest(logits.shape, lambda columns: logits[:, columns])
    entry = lowest_entry(logits.shape, lambda columns: logits[:, columns] == best)
    return jnp.maximum(jnp.max(best), _LOWEST), first + entry


def _own_segments(step: Step) -> SimpleNamespace:
    """This core's part of what spans the vocabulary.  # [.., SEGMENTS, shard lanes] each"""
    refs = step.refs
    assert isinstance(step.cores, ManyCores)
    found = {"row_logits": refs.row_logits.at[:SEGMENTS], "scaled_logits": refs.scaled_logits.at[:SEGMENTS]}
    if step.plan.penalties:
        own = pl.ds(pl.multiple_of(step.cores.me * SEGMENTS, SEGMENTS), SEGMENTS)
        found |= {name: getattr(refs, name).at[:, own] for name in ("logit_bias", "token_counts")}
    return SimpleNamespace(sampling_floats=refs.sampling_floats, **found)
