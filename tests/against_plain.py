"""k3-mini decoded plainly, one token a round and one sequence alone, and sessions with drafters to compare with it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from speculating import EVERY, Ask, caches_of, kept_logits, open_session, run

from megakernel.loading import LoadedModel
from megakernel.session import Session, SlotResult
from model.config import ModelConfig
from model.reference import random_weights
from model.sampling import SamplingParams
from spec_decode.dspark.config import DSparkConfig, dspark_specs
from spec_decode.dspark.drafter import DSparkDrafter

PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [17], [300 - 7 * i for i in range(23)])
CONTEXT = 512
MINI_DRAFTER = DSparkConfig(
    name="mini", block_size=4, tap_layers=(1, 3, 5), mask_token_id=383, vocab_size=384, markov_rank=16,
    confidence_head=False, hidden_size=128, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
    intermediate_size=64, rms_norm_eps=1e-5, sliding_window=16, rope_theta=1e4, target_hidden_size=128,
    shares_embeddings=True,
)  # fmt: skip
"""A small drafter for k3-mini; with random weights it is nearly always wrong."""


@functools.cache
def mini() -> LoadedModel:
    config = ModelConfig.preset("k3-mini")
    return LoadedModel(config, random_weights(config, 0))


def drafter_weights(config: DSparkConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(spec.shape, np.float32)
        if "norm" in name
        else rng.normal(0, 1 / np.sqrt(spec.shape[-1]), spec.shape).astype(np.float32)
        for name, spec in dspark_specs(config).items()
    }


def session(drafter: object = None, drafts: int | None = None, sequences: int = 1, **how: Any) -> Session:
    weights = drafter_weights(drafter.config) if isinstance(drafter, DSparkDrafter) else None
    sizes = {"context": CONTEXT, "launch_steps": CONTEXT}
    return open_session(mini(), drafter, drafts, sequences, draft_weights=weights, **sizes, **how)


@dataclasses.dataclass(frozen=True)
class Plain:
    """One sequence decoded without a drafter."""

    tokens: list[int]
    logprobs: list[float]
    logits: np.ndarray
    caches: dict[str, np.ndarray]
    steps: int
    reason: int


@functools.cache
def _plain(prompt: tuple[int, ...], new: int, sampling: SamplingParams, seed: int, stop: tuple[int, ...]) -> Plain:
    plain = session()
    plain.stop_tokens = list(stop)
    (result,) = run(plain, [Ask(prompt, new, sampling, seed)])
    caches = caches_of(plain, 0, result.steps)
    return Plain(result.tokens, result.logprobs, kept_logits(plain, 0), caches, result.steps, result.reason)


def plain(ask: Ask, stop: tuple[int, ...] = ()) -> Plain:
    return _plain(tuple(ask.prompt), ask.new, ask.sampling, ask.seed, stop)


def assert_same(ours: Session, slot: int, result: SlotResult, expected: Plain) -> None:
    assert result.tokens == expected.tokens
    assert result.logprobs == expected.logprobs
    assert (result.steps, result.reason) == (expected.steps, expected.reason)
    np.testing.assert_array_equal(kept_logits(ours, slot), expected.logits)
    for name, found in caches_of(ours, slot, expected.steps).items():
        np.testing.assert_array_equal(found, expected.caches[name], err_msg=name)


def scripts(asks: list[Ask]) -> dict[int, list[int]]:
    return {slot: [*ask.prompt, *plain(ask).tokens] for slot, ask in enumerate(asks)}


RIGHT: dict[str, Callable[[int], int]] = {
    "always right": lambda anchor: EVERY,
    "always wrong": lambda anchor: 0,
    "now and then": lambda anchor: anchor * 7 % 5,
}
