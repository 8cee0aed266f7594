"""The bookkeeping of a round: which tokens the rows hold, which of them are accepted, what is emitted.

Acceptance is lossless by construction, for greedy and for sampled decoding alike: every row's next token is chosen from
the target's logits with noise that depends only on the seed and the position (`phases.random`), just as plain decoding
would choose it there, and a draft is accepted if it equals that choice. So the tokens, the log-probabilities and the
states are those of plain decoding, whatever the drafter proposes. A one-hot draft is accepted with the probability that
the target gives it, which is the best any rule can do (Leviathan et al., arXiv 2211.17192); a drafter that samples with
the same noise is coupled to the target (Gumbel coupling, Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from megakernel import memory, shared_rows
from megakernel.control import when
from megakernel.layers import Step
from megakernel.memory import (
    ACTIVE,
    BAD_LAYER,
    BROKEN,
    COMMIT,
    COUNT,
    DRAFTS,
    FULL,
    GIVEN,
    NEW,
    POSITION,
    REASON,
    ROUNDS,
    RUNNING,
    START,
    STOPPED,
    TAKEN,
    TOKEN,
    WANTED,
)
from megakernel.phases import penalty, sample
from megakernel.stream import Scalar, bring, quotient

ALL_FINITE = 1 << 20
"""More than any layer's number."""


def begin(step: Step) -> Scalar:
    """First tokens and an empty status; returns how many sequences there are."""
    plan, refs = step.plan, step.refs
    alive = jnp.int32(0)
    for sequence in range(plan.sequences):
        present = (refs.request[sequence, GIVEN] > 0).astype(jnp.int32)
        values = {TOKEN: refs.tokens[sequence, 0], POSITION: refs.request[sequence, START], ACTIVE: present}
        for row, value in (values | {COUNT: 0, COMMIT: 0, DRAFTS: 0}).items():
            refs.current[row, sequence] = jnp.int32(value)
        for lane, number in {TAKEN: 0, NEW: 0, REASON: RUNNING, BAD_LAYER: -1, ROUNDS: 0}.items():
            refs.status[sequence, lane] = jnp.int32(number)
        for t in range(plan.tokens):
            refs.accepted[sequence, t] = jnp.int32(0)
            refs.proposed[sequence, t] = jnp.int32(0)
        alive += present
    for row in range(plan.live_rows):
        refs.window[row] = jnp.int32(0)
        refs.drafts[row] = jnp.int32(0)
    if plan.penalties:
        bring(refs.known_counts, refs.token_counts, refs.counts_done)
    return alive


def fill_window(step: Step) -> None:
    """Lays out the rows of this round: given tokens that are left, or the anchor and its drafts."""
    plan, refs = step.plan, step.refs

    def one(sequence: Scalar, _: None) -> None:
        active, taken = refs.current[ACTIVE, sequence], refs.status[sequence, TAKEN]
        given = refs.request[sequence, GIVEN] - taken
        wanted = refs.request[sequence, WANTED] - refs.status[sequence, NEW]
        drafted = jnp.minimum(1 + refs.current[DRAFTS, sequence], wanted)
        count = active * jnp.minimum(jnp.where(given > 1, given, drafted), plan.tokens)
        refs.current[COUNT, sequence] = count
        for t in range(plan.tokens):
            row = t * plan.sequences + sequence
            known = refs.tokens[sequence, jnp.minimum(taken + t, plan.launch_steps - 1)]
            draft = refs.current[TOKEN, sequence] if t == 0 else refs.drafts[row - plan.sequences]
            token = jnp.where((given > 1) & (t < given), known, draft)
            refs.window[row] = jnp.where(t < count, token, refs.window[row])

    lax.fori_loop(0, plan.sequences, one, None)


def accept(step: Step, bad_layer: Scalar) -> Scalar:
    """Chooses every row's next token, accepts what agrees and emits it; returns how many sequences go on."""
    plan, refs = step.plan, step.refs
    refs.bad_layer[0] = bad_layer
    if plan.split.cores > 1:
        shared_rows.choose_rows(step, choose)
    else:

        def one_row(row: Scalar, _: None) -> None:
            def load() -> jax.Array:
                return sample.load_logits(refs.out_head, row, refs.row_logits, plan.config.vocab_size)

            choose(step, row, load)

        lax.fori_loop(0, plan.live_rows, one_row, None)
    bad_layer = refs.bad_layer[0]
    return lax.fori_loop(
        0, plan.sequences, lambda sequence, alive: alive + _accept_sequence(step, sequence, bad_layer), jnp.int32(0)
    )


def choose(step: Step, row: Scalar, load: Callable[[], jax.Array]) -> None:
    """The token after a row, if there is one, and its log-probability.

    load: brings the row's logits into `row_logits` and returns how many of them are not finite.  # [] f32
    """
    plan, refs = step.plan, step.refs
    sequence, token = lax.rem(row, jnp.int32(plan.sequences)), quotient(row, plan.sequences)

    @when((row < plan.live_rows) & (token < refs.current[COUNT, sequence]))
    def choose_present() -> None:
        _choose(step, row, sequence, token, load())


def _choose(step: Step, row: Scalar, sequence: Scalar, token: Scalar, infinite: jax.Array) -> None:
    """The given token where the prompt goes on, else a drawn one."""
    plan, refs = step.plan, step.refs
    logits, scratch = refs.row_logits, sample.Scratch(refs.scaled_logits, refs.logit_mass)
    last_layer = jnp.where(infinite > 0.0, plan.config.num_hidden_layers, ALL_FINITE)
    refs.bad_layer[0] = jnp.minimum(refs.bad_layer[0], last_layer)

    sampling = sample.RowSampling.of(refs.sampling_floats, refs.sampling_ints, sequence)
    position = refs.current[POSITION, sequence] + token + 1
    adjusted = logits
    if plan.penalties:
        penalty.count_drafts(plan, refs, sequence, token, penalty.ONE_OUTPUT)
        adjusted = penalty.adjust(refs, sequence)
        penalty.count_drafts(plan, refs, sequence, token, -penalty.ONE_OUTPUT)
    chosen = sample.choose_token(adjusted, scratch, sampling, position)
    following = refs.status[sequence, TAKEN] + token + 1
    given = refs.tokens[sequence, jnp.minimum(following, plan.launch_steps - 1)]
    chosen = jnp.where(following < refs.request[sequence, GIVEN], given, chosen)
    chosen = jnp.minimum(chosen, plan.config.vocab_size - 1)  # NaN logits choose past the end, before they are reported
    refs.row_tokens[row] = chosen
    refs.row_logprobs[row] = sample.log_probability(logits, chosen)


def _accept_sequence(step: Step, sequence: Scalar, bad_layer: Scalar) -> Scalar:
    """Emits tokens row by row until a draft disagrees or the sequence ends; returns 1 while it goes on."""
    plan, refs = step.plan, step.refs
    count, before = refs.current[COUNT, sequence], refs.status[sequence, NEW]
    drafted = refs.status[sequence, TAKEN] + 1 >= refs.request[sequence, GIVEN]
    emitted = jnp.int32(0)
    going, reason = (count > 0).astype(jnp.int32), jnp.int32(RUNNING)
    for t in range(plan.tokens):
        row = t * plan.sequences + sequence
        token, taken = refs.row_tokens[row], refs.status[sequence, TAKEN]
        is_new = (going > 0) & (taken + 1 >= refs.request[sequence, GIVEN])
        new = refs.status[sequence, NEW] + is_new.astype(jnp.int32)
        _write_if(going, refs.new_tokens, sequence, taken, token)
        _write_if(going, refs.logprobs, sequence, taken, refs.row_logprobs[row])
        refs.status[sequence, NEW] = new
        refs.status[sequence, TAKEN] = taken + going
        refs.current[TOKEN, sequence] = jnp.where(going > 0, token, refs.current[TOKEN, sequence])
        emitted += going
        ended = jnp.where(
            _is_stop(step, token), STOPPED, jnp.where(new >= refs.request[sequence, WANTED], FULL, RUNNING)
        )
        reason = jnp.where(is_new, ended, reason)
        if t + 1 < plan.tokens:
            agrees = (t + 1 < count) & (refs.window[row + plan.sequences] == token)
            going = going * (agrees & (reason == RUNNING)).astype(jnp.int32)

    if plan.penalties:
        penalty.settle_counts(plan, refs, sequence, emitted)
    broken = (count > 0) & (bad_layer < ALL_FINITE)
    reason = jnp.where(broken, BROKEN, reason)
    goes_on = ((count > 0) & (reason == RUNNING)).astype(jnp.int32)
    _count_drafts(step, sequence, emitted, refs.status[sequence, NEW] > before, drafted)
    refs.current[COMMIT, sequence] = emitted
    refs.current[POSITION, sequence] = refs.current[POSITION, sequence] + emitted
    refs.current[ACTIVE, sequence] = goes_on
    refs.current[DRAFTS, sequence] = jnp.int32(0)
    refs.status[sequence, REASON] = jnp.where(count > 0, reason, refs.status[sequence, REASON])
    refs.status[sequence, BAD_LAYER] = jnp.where(broken, bad_layer, refs.status[sequence, BAD_LAYER])
    if plan.keep_logits:
        refs.round_tokens[sequence, step.number] = emitted
    return goes_on


def _write_if(condition: Scalar, buffer: object, sequence: Scalar, at: Scalar, value: Scalar) -> None:
    at = jnp.minimum(at, buffer.shape[1] - 1)  # type: ignore[attr-defined]
    buffer[sequence, at] = jnp.where(condition > 0, value, buffer[sequence, at])  # type: ignore[index]


def _is_stop(step: Step, token: Scalar) -> Scalar:
    stops = jnp.bool_(False)
    for i in range(memory.MAX_STOP_TOKENS):
        stops |= token == step.refs.stop_tokens[i]
    return stops


def _count_drafts(step: Step, sequence: Scalar, emitted: Scalar, is_new: Scalar, drafted: Scalar) -> None:
    """Statistics: rounds that make new tokens, and drafts proposed and accepted by place in the round.

    `drafted`: the rows after the first hold drafts; in a round that still reads the prompt they hold given tokens.
    """
    refs, count = step.refs, step.refs.current[COUNT, sequence]
    refs.status[sequence, ROUNDS] = refs.status[sequence, ROUNDS] + is_new.astype(jnp.int32)
    counts = (is_new & drafted).astype(jnp.int32)
    for t in range(1, step.plan.tokens):
        refs.proposed[sequence, t] = refs.proposed[sequence, t] + counts * (t < count).astype(jnp.int32)
        refs.accepted[sequence, t] = refs.accepted[sequence, t] + counts * (t < emitted).astype(jnp.int32)
