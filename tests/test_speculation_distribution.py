"""The law of what speculation emits, against the law it must have.

The launch is the real one, only its layers and its LM head are replaced: a row's logits are the line of a fixed table
that belongs to the row's token. So the target is a Markov chain, the law of the first three new tokens is known in
closed form, and the bookkeeping, the acceptance and the sampling of thousands of seeds run in seconds.

Power: with n draws and k cells, a law that differs by an effect of w = sqrt(sum (p - q)^2 / p) makes the chi-square
statistic noncentral, with noncentrality n w^2. At a level of 1e-4 a test refuses the right law in one run of 10,000
(seeds are fixed, so never by chance), and `test_power` computes that it finds w = 0.2 with a probability above 0.99.
Each of the mistakes below gets a p-value under 1e-6.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from speculating import GREEDY, Scripted

from megakernel import kernel, make_plan, memory, rounds
from megakernel.memory import DRAFTS, POSITION, TOKEN
from megakernel.phases import sample
from megakernel.session import SlotRequest, _request_arrays
from model.config import ModelConfig
from model.sampling import SamplingParams
from spec_decode import NGramDrafter

scipy_stats = pytest.importorskip("scipy.stats")

VOCAB, SEQUENCES, NEW = 8, 4, 3
WANTED = 5
"""New tokens of a launch: more than the `NEW` whose law is tested, so that rounds are full."""
DRAWS = 4000
LEVEL = 1e-4
PROMPT = [7, 6, 0, 7]  # prompt lookup drafts 6, 0, 7; the likeliest tokens are 6, 0, 6
CONFIG = dataclasses.replace(
    ModelConfig.preset("k3-mini"), vocab_size=VOCAB, eos_token_ids=(7,), bos_token_id=0, pad_token_id=6
)
TABLE = np.random.default_rng(0).normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)
"""Logits after each token."""
POINTS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "temperature 1.5, top-k 4": SamplingParams(temperature=1.5, top_k=4),
    "top-p 0.8": SamplingParams(temperature=1.0, top_p=0.8),
    "min-p 0.15": SamplingParams(temperature=1.2, min_p=0.15),
    "all filters": SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
}


@dataclasses.dataclass(frozen=True)
class Coupled(Scripted):
    """Draws its drafts as DSpark does, with the target's rule and noise, from other logits: the table, disturbed.

    `rounded`: the logits are the table's own, in bfloat16.
    """

    rounded: bool = False
    name: str = "coupled"

    def propose(self, step: Any, index: Any) -> Any:
        plan, refs = step.plan, step.refs
        other = TABLE + np.random.default_rng(1).normal(0, 0.6, TABLE.shape).astype(np.float32)
        table = TABLE.astype(ml_dtypes.bfloat16).astype(np.float32) if self.rounded else other

        def one(sequence: jax.Array, _: None) -> None:
            how = sample.RowSampling.of(refs.sampling_floats, refs.sampling_ints, sequence)
            token = refs.current[TOKEN, sequence]
            for k in range(plan.tokens - 1):
                position = refs.current[POSITION, sequence] + 1 + k
                refs.out_head[:1, :128] = line(table, token)
                sample.load_logits(refs.out_head, jnp.int32(0), refs.row_logits, VOCAB)
                scratch = sample.Scratch(refs.scaled_logits, refs.logit_mass)
                token = sample.choose_token(refs.row_logits, scratch, how, position)
                refs.drafts[k * plan.sequences + sequence] = token
            refs.current[DRAFTS, sequence] = jnp.int32(plan.tokens - 1)

        lax.fori_loop(0, plan.sequences, one, None)
        return index


def line(table: Any, token: jax.Array) -> jax.Array:
    """A token's logits as a row of lanes.  # [1, 128] f32

    Written with constants only: a kernel must not capture arrays.
    """
    lane = lax.broadcasted_iota(jnp.int32, (1, 128), 1)
    row = jnp.full((1, 128), -jnp.inf, jnp.float32)
    for at in range(VOCAB):
        value = jnp.float32(0)
        for before in range(VOCAB):
            value = jnp.where(token == before, float(table[before][at]), value)
        row = jnp.where(lane == at, value, row)
    return row


DRAFTERS = {
    "fixed": Scripted({s: [*PROMPT, 6, 0, 6, 0, 6] for s in range(SEQUENCES)}),
    "prompt lookup": NGramDrafter(shortest=1),
    "coupled": Coupled(),
}


Launches = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _lm_head(step: Any) -> None:
    def one(row: jax.Array, _: None) -> None:
        step.refs.out_head[pl.ds(row, 1), :128] = line(TABLE, step.refs.window[row])

    lax.fori_loop(0, step.plan.live_rows, one, None)


def compiled(drafter: Any) -> Launches:
    """`launches(seeds [n, SEQUENCES], sampling floats, sampling ints)`: new tokens and drafts accepted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "layer", lambda step, number, bad_layer: bad_layer)
        patch.setattr(kernel, "lm_head", _lm_head)
        for name in ("embed", "settle", "_drain"):
            patch.setattr(kernel, name, lambda step: None)
        plan = make_plan(
            CONFIG, sequences=SEQUENCES, context=128, launch_steps=16, drafter=drafter, draft_tokens=drafter and 3
        )
        shapes = (memory.weight_buffers(plan), memory.cache_buffers(plan))
        weights, caches = ({name: jnp.zeros(b.shape, b.dtype) for name, b in buffers.items()} for buffers in shapes)
        asked = _request_arrays(plan, [_request(GREEDY)] * SEQUENCES, [])

        def all_launches(seeds: jax.Array, floats: jax.Array, ints: jax.Array) -> tuple[jax.Array, jax.Array]:
            def one(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
                how = {"sampling_floats": floats, "sampling_ints": ints.at[:, sample.SEED_LOW].set(seed)}
                found, _ = kernel.launch(plan, weights, caches, asked | how, interpret=True)
                return found["new_tokens"][:, len(PROMPT) - 1 :][:, :WANTED], found["accepted"].sum()

            return lax.map(one, seeds)

        how = (asked["sampling_floats"], asked["sampling_ints"])
        return jax.jit(all_launches).lower(_seeds(), *how).compile()


def _request(sampling: SamplingParams) -> SlotRequest:
    return SlotRequest(PROMPT, 0, PROMPT, WANTED, sampling, 0)


def _seeds() -> jax.Array:
    return jnp.arange(DRAWS, dtype=jnp.int32).reshape(-1, SEQUENCES)


@functools.cache
def launches(name: str) -> Launches:
    return compiled(DRAFTERS[name])


def emitted(run: Launches, sampling: SamplingParams) -> tuple[np.ndarray, int]:
    """The new tokens for seeds 0 to DRAWS - 1, and how many drafts were accepted.  # [DRAWS, WANTED]"""
    plan = make_plan(CONFIG, sequences=SEQUENCES, context=128, launch_steps=16)
    how = _request_arrays(plan, [_request(sampling)] * SEQUENCES, [])
    tokens, accepted = run(_seeds(), how["sampling_floats"], how["sampling_ints"])
    return np.asarray(tokens).reshape(-1, WANTED), int(accepted.sum())


def one_step_law(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """softmax of what the filters keep, with sorting and in float64."""
    scaled = logits.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p[p < sampling.min_p] = 0.0
    order = np.argsort(-p, kind="stable")
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0.0
    return p / p.sum()


def law(sampling: SamplingParams) -> np.ndarray:
    """Of three tokens after the prompt.  # [VOCAB, VOCAB, VOCAB]"""
    step = np.stack([one_step_law(row, sampling) for row in TABLE])
    return step[PROMPT[-1]][:, None, None] * step[:, :, None] * step[None]


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's chi-square; cells with fewer than 5 expected draws are one cell. 0 if the impossible happened."""
    counts = np.zeros(expected.shape)
    np.add.at(counts, tuple(tokens[:, :NEW].T), 1)
    if counts[expected == 0].any():
        return 0.0
    large = expected * len(tokens) >= 5
    seen, wanted = counts[large], expected[large] * len(tokens)
    rest = (counts[~large].sum(), expected[~large].sum() * len(tokens))
    if rest[1] > 0:
        seen, wanted = np.append(seen, rest[0]), np.append(wanted, rest[1])
    return float(scipy_stats.chi2.sf(((seen - wanted) ** 2 / wanted).sum(), len(seen) - 1))


@pytest.mark.parametrize("point", POINTS)
def test_power(point: str) -> None:
    expected = law(POINTS[point])
    cells = min(int((expected * DRAWS >= 5).sum()) + 1, VOCAB**NEW)
    threshold = scipy_stats.chi2.isf(LEVEL, cells - 1)
    assert scipy_stats.ncx2.sf(threshold, cells - 1, DRAWS * 0.2**2) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_first_three_tokens_have_the_law_of_the_target(name: str) -> None:
    for point, sampling in POINTS.items():
        tokens, accepted = emitted(launches(name), sampling)
        p = p_value(tokens, law(sampling))
        print(f"{name}, {point}: p = {p:.3f}, {accepted / DRAWS:.2f} drafts accepted a sequence")
        assert p > LEVEL, point
        assert accepted > 0.3 * DRAWS


@pytest.mark.slow
def test_every_seed_gives_the_tokens_of_plain_decoding() -> None:
    """Stronger than the law: the same tokens, seed by seed, whatever drafts."""
    plain = compiled(None)
    for sampling in POINTS.values():
        tokens, accepted = emitted(plain, sampling)
        assert accepted == 0
        for name in DRAFTERS:
            np.testing.assert_array_equal(emitted(launches(name), sampling)[0], tokens)


def test_a_drafter_with_rounded_logits_changes_nothing() -> None:
    """A drafter that draws from logits in bfloat16 proposes another token now and then, and that is all it can do.

    In schemes with a residual distribution the drafter's probabilities enter the acceptance and the correction, so they
    have to be exactly those that it drew from: rounding between the two bends the output. Here nothing of a drafter but
    its tokens reaches the target, and a token is only compared with the one that the target has already chosen.
    """
    rounded = compiled(Coupled(rounded=True))
    for point in ("temperature 1", "all filters"):
        tokens, accepted = emitted(rounded, POINTS[point])
        other, fewer = emitted(launches("coupled"), POINTS[point])
        np.testing.assert_array_equal(tokens, other)
        assert accepted > fewer  # it is a much better drafter, yet not a perfect one
        assert accepted < 3 * DRAWS  # five new tokens, one with the prompt, then a round of four


# Mistakes


def shared_noise(patch: pytest.MonkeyPatch) -> None:
    """One position's noise on all of them."""
    draw = sample.choose_token
    patch.setattr(sample, "choose_token", lambda x, scratch, how, position: draw(x, scratch, how, 0 * position))


def no_temperature_on_drafted_rows(patch: pytest.MonkeyPatch) -> None:
    choose, draw, at = rounds._choose, sample.choose_token, []

    def row(step: Any, number: jax.Array, sequence: jax.Array, token: jax.Array, infinite: jax.Array) -> None:
        at.append(token)
        choose(step, number, sequence, token, infinite)

    def draw_cold(x: jax.Array, scratch: Any, how: Any, position: jax.Array) -> jax.Array:
        if at:
            how = dataclasses.replace(how, temperature=jnp.where(at[-1] > 0, 1.0, how.temperature))
        return draw(x, scratch, how, position)

    patch.setattr(rounds, "_choose", row)
    patch.setattr(sample, "choose_token", draw_cold)


def drafts_are_believed(patch: pytest.MonkeyPatch) -> None:
    """Every second draft counts as accepted, and is what comes out."""
    accept = rounds._accept_sequence

    def wrong(step: Any, sequence: jax.Array, bad_layer: jax.Array) -> jax.Array:
        refs, after = step.refs, step.plan.sequences + sequence
        is_draft = (refs.current[memory.DRAFTS, sequence] >= 0) & (step.number % 2 == 1)
        several = refs.current[memory.COUNT, sequence] > 1
        refs.row_tokens[sequence] = jnp.where(is_draft & several, refs.window[after], refs.row_tokens[sequence])
        return accept(step, sequence, bad_layer)

    patch.setattr(rounds, "_accept_sequence", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [shared_noise, no_temperature_on_drafted_rows, drafts_are_believed])
def test_mistakes_bend_the_law(mistake: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    sampling = POINTS["temperature 0.6"]
    tokens, _ = emitted(compiled(DRAFTERS["fixed"]), sampling)
    p = p_value(tokens, law(sampling))
    print(f"{mistake.__name__}: p = {p:.1e}")
    assert p < LEVEL / 100
