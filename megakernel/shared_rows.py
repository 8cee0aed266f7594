"""The next token of every row when the vocabulary is divided over cores: row r is chosen by core `r % cores`.

That core gets the row's logits from all the others, chooses as a single core would, and tells everyone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.collectives import Exchange
from megakernel.cores import AXIS, ManyCores
from megakernel.layers import Step, column
from megakernel.phases import sample
from megakernel.plan import Plan
from megakernel.program import LANES
from megakernel.stream import Ref, Scalar
from megakernel.vocabulary import SEGMENTS
from megakernel.wire import statistic, statistics

Choose = Callable[[Step, Scalar, Callable[[], jax.Array]], None]


def choose_rows(step: Step, choose: Choose) -> None:
    """Leaves what `choose(step, row, load)` finds for every row in `row_tokens`, `row_logprobs` and `bad_layer`."""
    plan, refs = step.plan, step.refs
    exchange = logits_exchange(step)
    for first in range(0, plan.live_rows, plan.split.cores):
        exchange.start_each(functools.partial(_shard_of, step, first), _shard_lanes(step))
        (pieces,) = exchange.finish()

        def load(pieces: Ref = pieces) -> jax.Array:
            return sample.load_shards(pieces, refs.row_logits, plan.config.vocab_size)

        choose(step, first + exchange.me, load)
    _tell_everyone(step)


def logits_exchange(step: Step) -> Exchange:
    return exchange_of(step.plan, step.refs, "logits")


def exchange_of(plan: Plan, refs: SimpleNamespace, name: str) -> Exchange:
    """One of `memory.EXCHANGES`."""
    inbox, sent, received, half = (getattr(refs, f"{name}_{part}") for part in ("inbox", "sent", "received", "half"))
    return Exchange(AXIS, plan.split.cores, inbox, sent, received, half, getattr(refs, f"{name}_outbox", None))


def _shard_lanes(step: Step) -> int:
    return step.plan.split.vocabulary // SEGMENTS


def _shard_of(step: Step, first: int, core: int) -> jax.Array | None:
    """This core's logits of row `first + core` as the sampler lays them out.  # [SEGMENTS, shard lanes] f32"""
    row = first + core
    if row >= step.plan.live_rows:
        return None
    lanes = _shard_lanes(step)
    logits = [step.refs.out_head[row : row + 1, s * lanes : (s + 1) * lanes] for s in range(SEGMENTS)]
    return jnp.concatenate(logits, axis=0)


def _tell_everyone(step: Step) -> None:
    plan, refs = step.plan, step.refs
    assert isinstance(step.cores, ManyCores)
    exchange = step.cores.pieces
    rows = range(plan.live_rows)
    found = [
        column([refs.row_tokens[row] for row in rows], plan.wire_rows).astype(jnp.float32),  # below 2 ** 24: exact
        column([refs.row_logprobs[row] for row in rows], plan.wire_rows),
        jnp.full((plan.wire_rows, 1), refs.bad_layer[0], jnp.int32).astype(jnp.float32),
    ]
    exchange.start_gather(statistics(*found))
    (pieces,) = exchange.finish()
    for row in rows:
        piece = pieces[row % plan.split.cores, :, :LANES].astype(jnp.float32)  # [wire rows, LANES]
        token, logprob = (scalar_of(statistic(piece, number), row) for number in (0, 1))
        refs.row_tokens[row] = token.astype(jnp.int32)
        refs.row_logprobs[row] = logprob
    worst = refs.bad_layer[0]
    for core in range(min(plan.split.cores, plan.live_rows)):
        bad = scalar_of(statistic(pieces[core, :, :LANES].astype(jnp.float32), 2), 0)
        worst = jnp.minimum(worst, bad.astype(jnp.int32))
    refs.bad_layer[0] = worst


def scalar_of(values: jax.Array, row: int) -> Scalar:
    """One entry of a column.  # [rows, 1] f32 -> [] f32"""
    at = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    return jnp.sum(jnp.where(at == row, values, 0.0))
