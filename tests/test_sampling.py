"""The kernel's sampling against its plain definition (`model.sampling`): the same token, always.

The kernel never sorts: it bisects on the bits of the logits. What could go wrong there is at the edges (ties, masks,
cuts that fall between two equal numbers), so the logits here are mostly made of edges. `MISTAKES` shows that the cases
tell classic mistakes from the definition.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.random import threefry_2x32

from megakernel import SamplingParams
from megakernel.phases import random as noise
from megakernel.phases import sample as phase
from megakernel.vocabulary import entries, vocabulary_shape
from model import sampling as plain

ROW = 5
"""Of the head's output, where the logits are."""
LOWEST = float(np.finfo(np.float32).min)
SEEDS = (0, 1, 0xFFFFFFFF, 1 << 32, 2**63 + 5, 2**64 - 1)
POSITIONS = (0, 1, 127, 4095, 2**20)


# ---- the two implementations, vectorised over draws ----


def request(params: SamplingParams, seeds: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
    """SMEM arrays of one row a draw: floats [n, 3], ints [n, 4] with the position in the last lane."""
    floats = np.zeros((len(seeds), 3), np.float32)
    floats[:, phase.TEMPERATURE], floats[:, phase.TOP_P] = params.temperature, params.top_p
    floats[:, phase.MIN_P] = params.min_p
    ints = np.zeros((len(seeds), 4), np.int32)
    ints[:, phase.TOP_K], ints[:, 3] = params.top_k, positions
    halves = np.array([(seed & 0xFFFFFFFF, seed >> 32) for seed in map(int, seeds)], np.uint32).view(np.int32)
    ints[:, phase.SEED_LOW], ints[:, phase.SEED_HIGH] = halves.T
    return floats, ints


def head_output(logits: np.ndarray) -> np.ndarray:
    """[V] as the head leaves it: in one row of several, with numbers past the vocabulary that nothing may look at."""
    width = math.prod(vocabulary_shape(len(logits)))
    rows = np.full((8, width), 1e30, np.float32)
    rows[ROW, : len(logits)] = logits
    return rows


def build_kernel(vocab: int, draws: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(floats, ints, output of the head) -> tokens [draws], log-probabilities [draws]; one draw a turn."""

    def body(floats: Any, ints: Any, out: Any, tokens: Any, logprobs: Any, logits: Any, *scratch: Any) -> None:
        def draw(row: jax.Array, _: None) -> None:
            phase.load_logits(out, jnp.int32(ROW), logits, vocab)
            asked = phase.RowSampling.of(floats, ints, row)
            tokens[row] = phase.choose_token(logits, phase.Scratch(*scratch), asked, ints[row, 3])
            logprobs[row] = phase.log_probability(logits, tokens[row])

        jax.lax.fori_loop(0, draws, draw, None)

    smem, vmem = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)
    call = pl.pallas_call(
        body,
        in_specs=[smem, smem, vmem],
        out_specs=[smem, smem],
        out_shape=[jax.ShapeDtypeStruct((draws,), jnp.int32), jax.ShapeDtypeStruct((draws,), jnp.float32)],
        scratch_shapes=[pltpu.VMEM(vocabulary_shape(vocab), jnp.float32)] * 3,
        interpret=True,
    )
    return jax.jit(call)


kernel = functools.cache(build_kernel)


def kernel_tokens(
    logits: np.ndarray, params: SamplingParams, seeds: np.ndarray, positions: np.ndarray, build: Any = kernel
) -> np.ndarray:
    return np.asarray(build(len(logits), len(seeds))(*request(params, seeds, positions), head_output(logits))[0])


@functools.cache
def gumbels(vocab: int) -> np.ndarray:
    """The plain noise of every seed and position.  # [draws, V]"""
    draws = [plain.gumbel_noise(seed, position, vocab) for seed, position in DRAWS]
    return np.stack([np.asarray(draw) for draw in draws])


def plain_tokens(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """`model.sampling.sample` for every seed and position, from its own parts."""
    if params.greedy:
        return np.full(len(DRAWS), int(plain.sample(jnp.asarray(logits), params, 0, 0)))
    kept = np.asarray(plain.kept_logits(jnp.asarray(logits), params))
    return (kept + gumbels(len(logits))).argmax(-1)


# ---- the cases ----

DRAWS = list(itertools.product(SEEDS, POSITIONS))
ALL_SEEDS = np.array([seed for seed, _ in DRAWS], object)
ALL_POSITIONS = np.array([position for _, position in DRAWS])


def logits_named(name: str, vocab: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    normal = rng.standard_normal(vocab).astype(np.float32)
    return {
        "normal": 3 * normal,
        "ties": np.round(2 * normal),  # a dozen values
        "all equal": np.full(vocab, 1.25, np.float32),
        "two values": np.where(np.arange(vocab) % 2 == 0, np.float32(0.5), np.float32(0.25)),
        "signed zeros": np.where(np.arange(vocab) % 2 == 0, np.float32(0.0), np.float32(-0.0)),
        "spike in the last entry": np.where(np.arange(vocab) == vocab - 1, np.float32(40), normal),
        "mostly excluded": np.where(np.arange(vocab) % 9 == 4, normal, np.float32(LOWEST)),
        "all but one excluded": np.where(np.arange(vocab) == vocab // 2, normal, np.float32(LOWEST)),
        "far below zero": normal - np.float32(1e4),
        "huge": 1e30 * normal,
    }[name]


LOGITS = (
    "normal", "ties", "all equal", "two values", "signed zeros", "spike in the last entry", "mostly excluded",
    "all but one excluded", "far below zero", "huge",
)  # fmt: skip
VOCABULARIES = (384, 200, 129, 1)
"""Whole lanes; lanes that the vocabulary does not fill; one entry past a lane; a single entry."""
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=1e6),
    SamplingParams(1.0, top_k=1),
    SamplingParams(1.0, top_k=2),
    SamplingParams(1.3, top_k=13),
    SamplingParams(1.0, top_k=199),
    SamplingParams(1.0, top_k=384),
    SamplingParams(1.0, top_k=100_000),
    SamplingParams(1.0, top_p=1e-6),
    SamplingParams(1.0, top_p=0.3),
    SamplingParams(1.5, top_p=0.9),
    SamplingParams(1.0, top_p=0.999999),
    SamplingParams(1.0, min_p=0.05),
    SamplingParams(2.0, min_p=0.5),
    SamplingParams(1.0, min_p=1.0),
    SamplingParams(1.5, top_k=20, top_p=0.8),
    SamplingParams(2.0, top_k=40, top_p=0.6, min_p=0.02),
    SamplingParams(0.8, top_k=5, top_p=0.5, min_p=0.2),
    SamplingParams(3.0, top_p=0.7, min_p=0.3),
)


def differences(vocab: int, build: Any = kernel, names: Any = LOGITS) -> list[tuple[str, SamplingParams]]:
    """Cases in which some draw gives another token than the definition."""
    found = []
    for name, params in itertools.product(names, SAMPLINGS):
        logits = logits_named(name, vocab)
        ours = kernel_tokens(logits, params, ALL_SEEDS, ALL_POSITIONS, build)
        if not np.array_equal(ours, plain_tokens(logits, params)):
            found.append((name, params))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_same_token_as_the_definition(vocab: int) -> None:
    assert differences(vocab) == []


@pytest.mark.parametrize("params", [SAMPLINGS[i] for i in (0, 2, 7, 13, 16, 19)], ids=str)
def test_sample_is_what_the_cases_are_compared_with(params: SamplingParams) -> None:
    logits = logits_named("normal", 200)
    direct = [int(plain.sample(jnp.asarray(logits), params, seed, position)) for seed, position in DRAWS]
    assert plain_tokens(logits, params).tolist() == direct
    assert (len(set(direct)) > 1) == (not params.greedy)


def test_equal_logits_go_to_the_lowest_index() -> None:
    for name, best in (("all equal", 0), ("two values", 0), ("signed zeros", 0), ("spike in the last entry", 199)):
        logits = logits_named(name, 200)
        for params in (SamplingParams(), SamplingParams(1.0, top_k=1), SamplingParams(1.0, top_p=1e-6)):
            assert set(kernel_tokens(logits, params, ALL_SEEDS, ALL_POSITIONS)) == {best}


def test_a_single_kept_token_is_drawn_whatever_the_noise() -> None:
    """Also where its noise is the lowest there is: were that -inf, the token would be no likelier than dropped ones."""
    logits = logits_named("spike in the last entry", 200)

    def lowest_noise(asked: phase.RowSampling, position: jax.Array, entry: jax.Array) -> jax.Array:
        return noise.gumbel(jnp.full(entry.shape, 0xFFFFFFFF, jnp.uint32))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phase, "noise", lowest_noise)
        drawn = kernel_tokens(logits, SamplingParams(1.0, top_k=1), ALL_SEEDS, ALL_POSITIONS, build_kernel)
    assert set(drawn) == {199}


def test_small_temperatures_are_greedy_and_large_ones_uniform() -> None:
    logits = logits_named("normal", 200)
    cold = kernel_tokens(logits, SamplingParams(1e-6), ALL_SEEDS, ALL_POSITIONS)
    assert set(cold) == {int(logits.argmax())}
    hot = kernel_tokens(logits, SamplingParams(1e30), ALL_SEEDS, ALL_POSITIONS)
    assert hot.tolist() == gumbels(200).argmax(-1).tolist()


# ---- classic mistakes ----

Mistake = Callable[[pytest.MonkeyPatch], None]
_filter, _noise, load_logits = phase._filter, phase.noise, phase.load_logits


def filtered(change: Callable[[phase.Scratch, jax.Array, phase.RowSampling], None]) -> Mistake:
    return lambda patch: patch.setattr(phase, "_filter", change)


def noisy(change: Callable[..., Any]) -> Mistake:
    return lambda patch: patch.setattr(phase, "noise", change)


def top_p_first(scratch: phase.Scratch, best: jax.Array, asked: phase.RowSampling) -> None:
    _filter(scratch, best, dataclasses.replace(asked, top_k=jnp.int32(0), min_p=jnp.float32(0)))
    _filter(scratch, best, dataclasses.replace(asked, top_p=jnp.float32(1)))


def min_p_last(scratch: phase.Scratch, best: jax.Array, asked: phase.RowSampling) -> None:
    _filter(scratch, best, dataclasses.replace(asked, min_p=jnp.float32(0)))
    _filter(scratch, best, dataclasses.replace(asked, top_k=jnp.int32(0), top_p=jnp.float32(1)))


def top_k_plus(extra: int) -> Callable[[phase.Scratch, jax.Array, phase.RowSampling], None]:
    def change(scratch: phase.Scratch, best: jax.Array, asked: phase.RowSampling) -> None:
        top_k = jnp.where(asked.top_k > 0, jnp.maximum(asked.top_k + extra, 1), 0)
        _filter(scratch, best, dataclasses.replace(asked, top_k=top_k))

    return change


def temperature_after_the_filters(scratch: phase.Scratch, best: jax.Array, asked: phase.RowSampling) -> None:
    scratch.scaled[...] = scratch.scaled[...] * asked.temperature
    _filter(scratch, best * asked.temperature, asked)
    scratch.scaled[...] = scratch.scaled[...] / asked.temperature


def every_tie_is_kept(quota: jax.Array, scratch: phase.Scratch) -> None:
    x, mass = (ref[...].reshape(1, -1) for ref in scratch)
    order = jnp.argsort(-x, axis=-1)
    ranked, weights = (jnp.take_along_axis(y, order, axis=-1) for y in (x, mass))
    before = jnp.cumsum(weights, axis=-1) - weights
    lowest = jnp.min(jnp.where(before < quota, ranked, jnp.inf), axis=-1, keepdims=True)
    scratch.scaled[...] = jnp.where(x >= lowest, x, -jnp.inf).reshape(scratch.scaled.shape)


def last_of_the_maxima(x: Any) -> jax.Array:
    return jnp.max(jnp.where(x[...] == jnp.max(x[...]), entries(x.shape, pl.ds(0, x.shape[1])), 0))


def first_in_columns(shape: Any, columns: Any) -> jax.Array:
    """Numbers the entries down the segments."""
    segment, lane = (jax.lax.broadcasted_iota(jnp.int32, (shape[0], columns.size), axis) for axis in (0, 1))
    return (lane + columns.start) * shape[0] + segment


def second_word(key: Any, counter: Any) -> Any:
    first, second = noise.threefry2x32(key, counter)
    return second, first


MISTAKES: dict[str, Mistake] = {
    "top-p before the other filters": filtered(top_p_first),
    "min-p after top-p": filtered(min_p_last),
    "one too many of top-k": filtered(top_k_plus(1)),
    "one too few of top-k": filtered(top_k_plus(-1)),
    "temperature after the filters": filtered(temperature_after_the_filters),
    "no filter at all": filtered(lambda scratch, best, asked: None),
    "every tie is kept": lambda patch: patch.setattr(phase, "_keep_within", every_tie_is_kept),
    "last of equal maxima": lambda patch: patch.setattr(phase, "argmax", last_of_the_maxima),
    "noise of position 0 everywhere": noisy(lambda asked, position, entry: _noise(asked, position * 0, entry)),
    "noise of the position before": noisy(lambda asked, position, entry: _noise(asked, position - 1, entry)),
    "high word of the seed ignored": noisy(
        lambda asked, *rest: _noise(dataclasses.replace(asked, seed=(asked.seed[0], asked.seed[1] * 0)), *rest)
    ),
    "words of the seed swapped": noisy(
        lambda asked, *rest: _noise(dataclasses.replace(asked, seed=asked.seed[::-1]), *rest)
    ),
    "the other word of the noise": lambda patch: patch.setattr(phase, "threefry2x32", second_word),
    "entries past the vocabulary": lambda patch: patch.setattr(
        phase, "load_logits", lambda out, row, logits, size: load_logits(out, row, logits, size + 1)
    ),
    "entries numbered down the segments": lambda patch: patch.setattr(phase, "entries", first_in_columns),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    assert differences(200, functools.cache(build_kernel), ("normal", "ties", "all equal"))


# ---- what is drawn ----


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, top_k=12),
        SamplingParams(1.5, top_p=0.7),
        SamplingParams(2.0, min_p=0.3),
        SamplingParams(0.7, top_k=30, top_p=0.95, min_p=0.01),
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_frequencies(over: str, params: SamplingParams) -> None:
    """Chi-square of 8,192 draws against the softmax of what the filters keep, at a level of 1e-4.

    Power: logits wrong by 0.15, up for one entry and down for the next, would be noticed with more than 99 %.
    """
    draws, logits = 8192, 1.5 * logits_named("normal", 200) / 3
    counter = np.arange(draws)
    seeds, positions = (counter * 0 + 11, counter) if over == "positions" else (counter * 2**33 + 1, counter * 0 + 5)
    tokens = kernel_tokens(logits, params, seeds, positions)
    share = np.asarray(jax.nn.softmax(plain.kept_logits(jnp.asarray(logits), params)), np.float64)
    assert set(tokens) <= set(np.flatnonzero(share))
    observed, expected = pooled(np.bincount(tokens, minlength=200), draws * share / share.sum())
    freedom = len(expected) - 1
    critical = scipy.stats.chi2.isf(1e-4, freedom)
    assert ((observed - expected) ** 2 / expected).sum() < critical

    other = share * np.exp(np.where(np.arange(200) % 2 == 0, 0.15, -0.15))
    shifted, expected = pooled(draws * other / other.sum(), draws * share / share.sum())
    distance = ((shifted - expected) ** 2 / expected).sum()
    assert scipy.stats.ncx2.sf(critical, freedom, distance) > 0.99


def pooled(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries expected fewer than ten times count as one."""
    rare = expected < 10
    parts = [np.append(array[~rare], array[rare].sum()) for array in (counts, expected)]
    return (parts[0], parts[1]) if parts[1][-1] > 0 else (parts[0][:-1], parts[1][:-1])


def test_log_probability_is_of_the_raw_logits() -> None:
    """Whatever temperature and filters are asked for; a few roundings of a sum of 200 terms."""
    for name, params in itertools.product(
        ("normal", "ties", "all equal", "mostly excluded", "far below zero"),
        (SAMPLINGS[0], SAMPLINGS[2], SAMPLINGS[19]),
    ):
        logits = logits_named(name, 200)
        run = kernel(200, len(DRAWS))
        tokens, logprobs = run(*request(params, ALL_SEEDS, ALL_POSITIONS), head_output(logits))
        exact = scipy.special.log_softmax(logits.astype(np.float64))[np.asarray(tokens)]
        np.testing.assert_allclose(logprobs, exact, rtol=0, atol=2e-6 * max(1.0, -exact.min()))


# ---- the noise ----


def test_threefry_known_answers() -> None:
    """The vectors of Random123's `kat_vectors` for threefry2x32 with 20 rounds."""
    for counter, key, expected in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ):
        as_words = [tuple(jnp.uint32(word) for word in pair) for pair in (key, counter)]
        assert tuple(map(int, noise.threefry2x32(*as_words))) == expected


def test_threefry_is_the_one_of_jax() -> None:
    rng = np.random.default_rng(0)
    key, x, y = (rng.integers(0, 2**32, n, dtype=np.uint32) for n in (2, 1000, 1000))
    words = tuple(map(jnp.uint32, key))
    ours = np.concatenate(noise.threefry2x32(words, (jnp.asarray(x), jnp.asarray(y))))
    np.testing.assert_array_equal(ours, threefry_2x32(jnp.asarray(key), jnp.concatenate([x, y])))
    with jax.threefry_partitionable(True):
        bits = jax.random.bits(jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32"), (1000,), jnp.uint32)
    first, second = noise.threefry2x32(words, (jnp.zeros(1000, jnp.uint32), jnp.arange(1000, dtype=jnp.uint32)))
    np.testing.assert_array_equal(first ^ second, bits)


def test_noise_is_gumbel() -> None:
    """Mean, variance and distribution of 2^20 numbers; bounds of five standard errors."""
    count = 2**20
    counter = jnp.arange(count, dtype=jnp.uint32)
    bits, _ = noise.threefry2x32((jnp.uint32(3), jnp.uint32(4)), (counter * 0 + 17, counter))
    drawn = np.asarray(noise.gumbel(bits), np.float64)
    variance = math.pi**2 / 6
    assert abs(drawn.mean() - np.euler_gamma) < 5 * math.sqrt(variance / count)
    assert abs(drawn.var() - variance) < 5 * variance * math.sqrt(4.4 / count)  # kurtosis 5.4
    assert scipy.stats.kstest(drawn, "gumbel_r").pvalue > 1e-4


def test_noise_is_finite_at_both_ends_and_the_same_as_the_definition() -> None:
    ends = np.asarray(noise.gumbel(jnp.array([0, 0xFF, 0x100, 2**31, 0xFFFFFEFF, 0xFFFFFFFF], jnp.uint32)))
    assert np.isfinite(ends).all()
    assert (np.diff(ends) <= 0).all()  # small bits are the large values
    assert ends[0] == ends[1] > ends[2]
    for seed, position in ((0, 0), (2**63 + 5, 77), (2**64 - 1, 2**20)):
        words = (jnp.uint32(seed & 0xFFFFFFFF), jnp.uint32(seed >> 32))
        bits, _ = noise.threefry2x32(words, (jnp.full(300, position, jnp.uint32), jnp.arange(300, dtype=jnp.uint32)))
        np.testing.assert_allclose(noise.gumbel(bits), plain.gumbel_noise(seed, position, 300), rtol=1e-6)


def test_keys_are_ordered_like_the_floats() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(1000).astype(np.float32) * np.exp(rng.uniform(-80, 80, 1000)).astype(np.float32)
    edges = np.array([-np.inf, LOWEST, -1, -1.2e-38, 0.0, 1.2e-38, 1, -LOWEST, np.inf], np.float32)
    for values in (np.unique(x), edges):
        assert (np.diff(np.asarray(phase.sortable(jnp.asarray(values))).astype(np.int64)) > 0).all()
    assert len(set(np.asarray(phase.sortable(jnp.array([-0.0, 0.0]))).tolist())) == 1


# ---- what is refused ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf, -math.inf)),
        *(("top_k", value) for value in (-1, 1.5, True, "3")),
        *(("top_p", value) for value in (0, 0.0, -0.5, 1.0001, math.nan, math.inf)),
        *(("min_p", value) for value in (-0.001, 1.1, math.nan)),
    ],
)
def test_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} = .*; expected"):
        SamplingParams(**{field: value})


def test_bounds_are_accepted() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-6, top_k=0, top_p=1, min_p=1).greedy
    assert SamplingParams(top_p=1e-9, min_p=0, top_k=10**6).greedy
