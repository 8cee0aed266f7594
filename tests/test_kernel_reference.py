"""The kernel against the flax reference and against the official outputs, on the same weights.

The bounds are derived in `against_reference`; what is measured is about an eighth of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from against_reference import (
    CONTEXT,
    UNIT,
    float32_bound,
    gain,
    model_named,
    random_tokens,
    reference,
    reference_logits,
    stepped,
    teacher_forced,
)
from launching import DATA, Ask, Ran, launch_once, needs_nano, open_session, relative_error, run, slot_caches
from safetensors.numpy import load_file

from megakernel import LoadedModel, load
from megakernel.session import Session
from model.config import ModelConfig
from model.reference import Cache, init_cache, load_model, step

TINY = DATA / "tiny_stable_mxfp4"


def launch_three(name: str, asks: list[Ask]) -> tuple[Session, list[Ran]]:
    """Up to three sequences; always the same plan, so that each model compiles once."""
    session = open_session(model_named(name), 3, context=CONTEXT, launch_steps=CONTEXT)
    return session, [ran for ran in launch_once(session, asks) if ran]


# ---- float32: logits, tokens, caches ----

NAMES = ["k3-mini", "klinear", pytest.param("k3-nano", marks=needs_nano)]


@pytest.mark.parametrize("name", NAMES)
def test_teacher_forced_logits(name: str) -> None:
    """Sequences of different lengths in one launch, each fed known tokens to its end."""
    sequences = [random_tokens(name, length, seed=length) for length in (24, 17, 1)]
    for tokens, ran in zip(sequences, launch_three(name, [Ask(s, new=1) for s in sequences])[1], strict=True):
        assert ran.fed == tokens
        assert relative_error(ran.logits, reference_logits(name, tokens)) < float32_bound(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_reference(name: str) -> None:
    """256 new tokens each. By induction: after the kernel's tokens the reference's likeliest is the kernel's next."""
    prompts = [random_tokens(name, length, seed=length) for length in (2, 7, 33)]
    if name == "k3-nano":
        encode = model_named(name).tokenizer.encode
        prompts = [encode(text) for text in ("We the People of", "Section 3. The Senate", "def main():\n")]
    asks = [Ask(prompt, new=256) for prompt in prompts]
    for ask, ran in zip(asks, launch_three(name, asks)[1], strict=True):
        assert len(ran.tokens) == 256
        assert ran.fed[len(ask.tokens) :] == ran.tokens[:-1]
        expected, _ = teacher_forced(reference(name), ran.fed)  # of 4,000 choices of experts some are close, none flips
        assert relative_error(ran.logits, expected) < float32_bound(name)
        assert expected[len(ask.tokens) - 1 :].argmax(-1).tolist() == ran.tokens
        logprobs = jax.nn.log_softmax(expected[len(ask.tokens) - 1 :])
        chosen = np.take_along_axis(np.asarray(logprobs), np.asarray(ran.tokens)[:, None], axis=1)[:, 0]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(ran.logprobs, chosen, atol=4 * float32_bound(name) * scale)


@pytest.mark.parametrize("name", ["k3-mini", "klinear"])
def test_caches_are_those_of_the_reference(name: str) -> None:
    """KDA states, convolution tails and MLA latents of two slots that ran a different number of tokens."""
    sequences = [random_tokens(name, length, seed=length) for length in (21, 2)]
    session, _ = launch_three(name, [Ask(s, new=1) for s in sequences])
    for slot, tokens in enumerate(sequences):
        check_caches(name, session, slot, tokens)


def test_caches_go_on_from_launch_to_launch() -> None:
    """Three launches of 9, 1 and 6 tokens leave what one of 16 leaves, and an idle slot stays as it is."""
    tokens, name = random_tokens("k3-mini", 16, seed=3), "k3-mini"
    idle = random_tokens(name, 5, seed=4)
    session, _ = launch_three(name, [Ask(tokens[:9], new=1), Ask(idle, new=1)])
    before = slot_caches(session, 1, len(idle))
    launch_once(session, [Ask(tokens[9:10], new=1, position=9), None])
    launch_once(session, [Ask(tokens[10:], new=1, position=10), None])
    check_caches(name, session, 0, tokens)
    for kept, now in zip(jax.tree.leaves(before), jax.tree.leaves(slot_caches(session, 1, len(idle))), strict=True):
        np.testing.assert_array_equal(kept, now)


def check_caches(name: str, session: Session, slot: int, tokens: list[int]) -> None:
    _, cache = stepped(name, tokens)
    ours = slot_caches(session, slot, len(tokens))
    theirs = {
        "kda_state": [np.asarray(state[0]) for state in cache.kda_state],
        "conv_tail": [np.asarray(tail[0]) for tail in cache.conv_tail],
        "latents": [np.asarray(latent[0, : len(tokens)]) for latent in cache.latents],
    }
    for kind, layers_of_kind in theirs.items():
        assert len(ours[kind]) == len(layers_of_kind) > 0
        for mine, expected in zip(ours[kind], layers_of_kind, strict=True):
            assert mine.shape == expected.shape
            assert relative_error(mine, expected) < float32_bound(name), kind


# ---- the official outputs ----


@functools.cache
def official() -> dict[str, np.ndarray]:
    return load_file(TINY / "ref.safetensors")


@functools.cache
def tiny() -> LoadedModel:
    return load(TINY)


@pytest.mark.parametrize(("mode", "tolerance"), [("f32", 1e-5), ("bf16", 2e-2)])
def test_official_kimi_k3_outputs(mode: str, tolerance: float) -> None:
    """Logits of all three prompts; after the longest one, states, tails and latents. Heads here are 32 wide."""
    prompts = [official()[f"ids.p{i}"].tolist() for i in range(3)]
    session = open_session(tiny(), 3, activations={"f32": "float32", "bf16": "bfloat16"}[mode])
    agree: list[bool] = []
    for i, ran in enumerate(launch_once(session, [Ask(prompt, new=1) for prompt in prompts])):
        assert ran is not None
        expected = official()[f"{mode}.p{i}.logits_full"].astype(np.float32)
        assert relative_error(ran.logits, expected) < tolerance
        agree += (ran.logits.argmax(-1) == expected.argmax(-1)).tolist()
    assert np.mean(agree) >= (1.0 if mode == "f32" else 0.9)
    caches = slot_caches(session, 0, len(prompts[0]))
    for i, number in enumerate(tiny().config.kda_layers):
        assert relative_error(caches["kda_state"][i], official()[f"{mode}.p0.kda_state.{number}"]) < tolerance
        if mode == "f32":
            tail = caches["conv_tail"][i].reshape(3, 3, -1).swapaxes(0, 1)  # [q k v, oldest to newest, channel]
            assert relative_error(tail, official()[f"f32.p0.conv_state.{number}"]) < tolerance
    if mode == "f32":
        parts = [official()[f"f32.p0.trace_mla_{part}"] for part in ("latent", "krot")]
        assert relative_error(np.stack(caches["latents"]), np.concatenate(parts, axis=-1)) < tolerance


@pytest.mark.parametrize("number", [0, 3])
def test_official_kimi_linear_layers(number: int) -> None:
    """A KDA layer with a dense FFN and an MLA layer with bfloat16 experts, each as a model of one layer.

    The official inputs are the embedding table and the LM head is the identity: what comes out is the layer's output
    over its root mean square. The table holds bfloat16, which the inputs of layer 3 are not: rounding them moves the
    outputs by 2e-3. There the exact comparison is with the reference, which `test_reference` compares officially.
    """
    data = load_file(DATA / "klinear_layers.safetensors")
    inputs, expected = data[f"ref.layer{number}.in"], data[f"ref.layer{number}.out"]
    full = ModelConfig.from_file(DATA / "klinear_config.json")
    config = dataclasses.replace(
        full,
        vocab_size=full.hidden_size,
        num_hidden_layers=1,
        mla_layers=(0,) if number == 3 else (),
        first_k_dense_replace=0 if number == 3 else 1,
    )
    prefix, new_prefix = f"model.layers.{number}.", "model.layers.0."
    weights = {name.replace(prefix, new_prefix): value for name, value in data.items() if name.startswith(prefix)}
    embedding = np.zeros((config.vocab_size, config.hidden_size), ml_dtypes.bfloat16)
    embedding[: len(inputs)] = inputs
    weights |= {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(config.hidden_size, ml_dtypes.bfloat16),
        "lm_head.weight": np.eye(config.hidden_size, dtype=ml_dtypes.bfloat16),
    }
    session = open_session(LoadedModel(config, weights))
    (ran,) = launch_once(session, [Ask(list(range(len(inputs))), new=1)])
    assert ran is not None
    rms = np.sqrt(np.mean(expected.astype(np.float64) ** 2, axis=-1, keepdims=True) + config.rms_norm_eps)
    caches = slot_caches(session, 0, len(inputs))
    if number == 0:
        assert relative_error(ran.logits, expected / rms) < 1e-5
        assert relative_error(caches["kda_state"][0], data["ref.layer0.kda_state"]) < 1e-5
        tail = caches["conv_tail"][0].reshape(3, 3, -1).swapaxes(0, 1)
        assert relative_error(tail, data["ref.layer0.conv_state"]) < 1e-5
        return
    assert relative_error(ran.logits, expected / rms) < 4e-3
    tokens = jnp.arange(len(inputs))[None]
    hidden, cache = load_model(weights, config).hidden(tokens, None, None, "sequence")
    assert relative_error(ran.logits, hidden[0]) < 1e-5
    assert relative_error(caches["latents"][0], cache.latents[0][0]) < 1e-5


# ---- bfloat16: the plan that runs on a TPU ----


@functools.partial(jax.jit, donate_argnums=2)
def traced_step(model: Any, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache, jax.Array, jax.Array]:
    """Logits, cache, router margins [layers, B] and chosen experts [layers, B, k]."""
    trace: dict[str, list[jax.Array]] = {}
    logits, cache = step(model, tokens, cache, trace=trace)
    margins = jnp.stack([margin.reshape(len(tokens)) for margin in trace["router_margin"]])
    chosen = jnp.stack([ids.reshape(len(tokens), -1) for ids in trace["topk_idx"]])
    return logits, cache, margins, chosen


def wide_margins(name: str, count: int, tries: int = 16) -> list[int]:
    """A sequence in which every router decision is clear: at each position, of some random tokens the clearest."""
    rng, config = np.random.default_rng(0), model_named(name).config
    cache, tokens = init_cache(config, tries, 64, jnp.bfloat16), []
    for _ in range(count):
        candidates = rng.integers(3, config.vocab_size, tries)
        _, cache, margins, _ = traced_step(reference(name, "bfloat16"), jnp.asarray(candidates), cache)
        best = int(np.asarray(margins).min(axis=0).argmax())
        tokens.append(int(candidates[best]))
        cache = jax.tree.map(lambda leaf, best=best: jnp.repeat(leaf[best : best + 1], tries, axis=0), cache)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k3-mini", pytest.param("k3-nano", marks=needs_nano)])
def test_bfloat16_plan_of_a_tpu(name: str) -> None:
    """The v7x plan, interpreted: as near to the exact logits as the bfloat16 reference, and as near to each other."""
    tokens, found = wide_margins(name, 24), {}
    for dtype in ("float32", "bfloat16"):
        cache = init_cache(model_named(name).config, 1, 64, jnp.dtype(dtype))
        logits, chosen = [], []
        for token in tokens:
            now, cache, _, ids = traced_step(reference(name, dtype), jnp.asarray([token]), cache)
            logits.append(np.asarray(now[0]))
            chosen.append(np.sort(np.asarray(ids[:, 0])))
        found[dtype] = np.stack(logits), np.stack(chosen)
    (exact, experts_exact), (rounded, experts_rounded) = found["float32"], found["bfloat16"]
    np.testing.assert_array_equal(experts_exact, experts_rounded)  # the tokens do what they were chosen for
    (ran,) = run(model_named(name), Ask(tokens, new=1), target="v7x")
    bound = 2 * gain(name) * 4**0.5 * UNIT["bfloat16"]
    assert bound < 0.1
    assert relative_error(ran.logits, rounded) < bound
    assert relative_error(ran.logits, exact) < 1.25 * relative_error(rounded, exact)
    assert np.mean(ran.logits.argmax(-1) == exact.argmax(-1)) >= 0.9
