"""A sequence's numbers never depend on what is decoded beside it: equal bits in any batch, slot and company.

Everything here compares bits, not tolerances: logits, log-probabilities, tokens and caches of one sequence alone with
those of the same sequence among others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from launching import Ask, Ran, launch_once, needs_nano, open_session, random_model, slot_caches

from megakernel import Generation, LoadedModel, SamplingParams, decode, load
from megakernel.session import Session

PAGE = 16
PROMPT = [7, 45, 300, 122, 9, 17, 200, 31, 77, 5, 150, 63]
"""Together with its new tokens it crosses a page of the MLA cache."""
SUBJECTS = {
    "greedy": Ask(PROMPT, new=8),
    "sampled": Ask(PROMPT, new=8, sampling=SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01), seed=3),
}


@functools.cache
def session(sequences: int, machine: str) -> Session:
    """One compilation a size. `machine` is a target, whose experts meet single rows, or all rows where they are few; or
    "nano" for the shipped model on the CPU."""
    models = {"nano": lambda: load("k3-nano"), "v7x": many_experts}
    model, target = models.get(machine, random_model)(), "cpu" if machine == "nano" else machine.split(",")[0]
    return open_session(model, sequences, target=target, page=PAGE)


def many_experts() -> LoadedModel:
    """So many that on a TPU each meets single rows."""
    return random_model(num_experts=40)


def launched(asks: Sequence[Ask | None], slot: int, machine: str = "cpu") -> tuple[Ran, list[np.ndarray]]:
    """What the sequence in `slot` gave and left in its caches, from empty caches."""
    opened = session(len(asks), machine)
    opened.caches = {name: np.zeros(cache.shape, cache.dtype) for name, cache in opened.caches.items()}
    ran = launch_once(opened, asks)[slot]
    assert ran is not None
    return ran, jax.tree.leaves(slot_caches(opened, slot, len(ran.fed)))


@functools.cache
def alone(subject: str, machine: str) -> tuple[Ran, list[np.ndarray]]:
    return launched([SUBJECTS[subject]], 0, machine)


def company(count: int, seed: int) -> list[Ask | None]:
    """Neighbours of other lengths and settings; some end at once, some go on for longer, some slots stay empty."""
    rng, asks = np.random.default_rng(seed), []
    for i in range(count):
        if i % 5 == 4:
            asks.append(None)
            continue
        prompt = rng.integers(3, 384, rng.integers(1, 25)).tolist()
        sampling = SamplingParams(temperature=float(rng.choice([0.0, 0.7])), top_k=int(rng.choice([0, 5])))
        asks.append(Ask(prompt, new=int(rng.integers(1, 20)), sampling=sampling, seed=i))
    return asks


def check_equal_bits(found: tuple[Ran, list[np.ndarray]], expected: tuple[Ran, list[np.ndarray]]) -> None:
    (ran, caches), (ran_alone, caches_alone) = found, expected
    assert ran.tokens == ran_alone.tokens
    np.testing.assert_array_equal(ran.logits, ran_alone.logits)
    assert ran.logprobs == ran_alone.logprobs
    for cache, cache_alone in zip(caches, caches_alone, strict=True):
        np.testing.assert_array_equal(cache, cache_alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "sequences"),
    [
        *itertools.product(("cpu",), (2, 4, 8, 16)),
        *itertools.product(("v7x", "v7x, few experts"), (2, 4, 8)),
        pytest.param("nano", 16, marks=needs_nano),
    ],
)
def test_in_any_batch_and_slot(machine: str, sequences: int) -> None:
    """With 16 sequences a v7x plan stacks 128 rows of an expert's operand, and XLA's CPU product of so many adds in
    another order than that of fewer: nothing that a TPU does."""
    if machine.startswith("v7x"):
        assert session(sequences, machine).plan.expert_rows == (1 if machine == "v7x" else sequences)
    for subject, ask in SUBJECTS.items():
        for slot in {0, sequences // 2, sequences - 1}:
            asks = company(sequences - 1, seed=slot)
            asks.insert(slot, ask)
            check_equal_bits(launched(asks, slot, machine), alone(subject, machine))


def test_in_any_company() -> None:
    """The same batch and slot, other neighbours: none, copies of itself, finished long before, going on long after."""
    ask, others = SUBJECTS["sampled"], [
        [None, None, None],
        [SUBJECTS["sampled"]] * 3,
        [Ask([9], new=1)] * 3,
        [Ask([9] * 24, new=30)] * 3,
        company(3, seed=9),
    ]  # fmt: skip
    for neighbours in others:
        check_equal_bits(launched([*neighbours, ask], 3), alone("sampled", "cpu"))


def test_the_seed_and_the_prompt_do_matter() -> None:
    """The comparison sees differences: another seed or one other token gives other numbers."""
    ask, (expected, _) = SUBJECTS["sampled"], alone("sampled", "cpu")
    reseeded, _ = launched([Ask(ask.tokens, ask.new, ask.sampling, seed=4)], 0)
    assert reseeded.tokens != expected.tokens
    np.testing.assert_array_equal(reseeded.logits[: len(PROMPT)], expected.logits[: len(PROMPT)])
    other, _ = launched([Ask([*PROMPT[:-1], 64], ask.new, ask.sampling, ask.seed)], 0)
    assert (other.logits[len(PROMPT) - 1] != expected.logits[len(PROMPT) - 1]).any()


def test_split_into_launches() -> None:
    """One launch of 8 new tokens, and launches of 3, 1 and 4 that go on from each other."""
    for subject, ask in SUBJECTS.items():
        expected, _ = alone(subject, "cpu")
        opened = session(1, "cpu")
        opened.caches = {name: np.zeros(cache.shape, cache.dtype) for name, cache in opened.caches.items()}
        tokens, logits, given, position = [], [], list(PROMPT), 0
        for new in (3, 1, 4):
            part = Ask(given, new, ask.sampling, ask.seed, position)
            (ran,) = launch_once(opened, [part])
            assert ran is not None
            tokens += ran.tokens
            logits.append(ran.logits)
            given, position = ran.tokens[-1:], position + len(ran.fed)
        assert tokens == expected.tokens
        np.testing.assert_array_equal(np.concatenate(logits), expected.logits)


# ---- through the public API ----


@pytest.mark.slow
def test_decode_gives_the_same_in_any_batch() -> None:
    """Short and long prompts (the latter through the reference's chunks), each alone and among 1, 4 and 16 others."""
    model, rng = random_model(), np.random.default_rng(0)
    prompts = [PROMPT, rng.integers(3, 384, 100).tolist(), [9], rng.integers(3, 384, 64).tolist()]
    prompts += [rng.integers(3, 384, int(n)).tolist() for n in rng.integers(1, 80, 13)]
    samplings = [
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(),
        SamplingParams(temperature=1.2, top_k=9),
    ]
    samplings = [samplings[i % 3] for i in range(len(prompts))]
    seeds = list(range(len(prompts)))

    def decoded(chosen: Sequence[int]) -> list[Generation]:
        found = decode(
            model,
            [prompts[i] for i in chosen],
            max_new_tokens=12,
            sampling=[samplings[i] for i in chosen],
            seed=[seeds[i] for i in chosen],
            logprobs=True,
            backend="interpret",
        )
        assert isinstance(found, list)
        return found

    by_itself = {i: decoded([i])[0] for i in range(4)}
    for chosen in ([1, 0], [3, 1, 2, 0, 5], list(range(17))):
        for i, generation in zip(chosen, decoded(chosen), strict=True):
            if i in by_itself:
                assert generation.tokens == by_itself[i].tokens
                assert generation.logprobs == by_itself[i].logprobs
