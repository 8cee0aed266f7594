"""The kernel against the flax reference and against the official outputs, on the same weights.

**Bound in float32.** Products and sums of float32 numbers are rounded; a sum over k terms equals the exact sum with
every term changed by a relative error of about sqrt(k) u, u = 2^-24 (Higham and Mary, SIAM J. Sci. Comput. 41, 2019:
roundings are as good as independent), and the few roundings of a norm or a gate add to that like more terms. So a
float32 run behaves like an exact run whose weights are changed by sqrt(k) u. How much such a change moves the logits is
measured on the reference itself: `gain` is the relative change of the logits over a relative change of every weight.
Kernel and reference err independently, each by gain sqrt(k) u; the bound is their sum. It comes out at 1e-5 for
`k3-mini` and 5e-6 for `k3-nano`; what is measured is about an eighth of it.

**Bound in bfloat16.** Activations are rounded to u = 2^-8 instead, about four times between one weight matrix and the
next (sum, gate, norm and its weight): bound 2 gain sqrt(4) u. Which experts a token takes must not depend on a
rounding, so the tokens are chosen such that the router's margins are wide (see `wide_margins`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from launching import (
    DATA,
    Ask,
    Ran,
    anew,
    launch_once,
    needs_nano,
    open_session,
    perturbed,
    random_model,
    relative_error,
    run,
    slot_caches,
)
from safetensors.numpy import load_file

import megakernel.kernel
from megakernel import LoadedModel, NumericsError, layers, load
from megakernel.phases import experts, ffn, kda, mla, mxfp4, route, sample
from megakernel.session import Session
from model.config import ModelConfig
from model.reference import Cache, forward, init_cache, jit_step, load_model, random_weights, step

TINY = DATA / "tiny_stable_mxfp4"
CONTEXT = 320
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


# ---- models and bounds ----


@functools.cache
def model_named(name: str) -> LoadedModel:
    if name == "k3-nano":
        return load("k3-nano")
    if name == "klinear":  # the official small configuration; only two of its layers are in tests/data
        config = ModelConfig.from_file(DATA / "klinear_config.json")
        return LoadedModel(config, random_weights(config, 0))
    return random_model(name)


@functools.cache
def reference(name: str, dtype: str = "float32") -> Any:
    model = model_named(name)
    return load_model(model.weights, model.config, jnp.dtype(dtype))


@jax.jit
def with_margins(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [1, T, V] and the smallest router margin of every position [T]."""
    trace: dict[str, list[jax.Array]] = {}
    logits = forward(model, tokens, trace=trace)
    return logits, jnp.min(jnp.stack(trace["router_margin"]).reshape(-1, tokens.shape[1]), axis=0)


def teacher_forced(model: Any, tokens: list[int]) -> tuple[np.ndarray, float]:
    """Logits and the smallest router margin of a sequence, padded on the right to one compiled length."""
    padded = jnp.asarray([[*tokens, *[0] * (CONTEXT - len(tokens))]])
    logits, margins = with_margins(model, padded)
    return np.asarray(logits[0, : len(tokens)]), float(margins[: len(tokens)].min())


def reference_logits(name: str, tokens: list[int]) -> np.ndarray:
    """Teacher forced, float32; every choice of experts is certain."""
    logits, margin = teacher_forced(reference(name), tokens)
    assert margin > float32_bound(name)
    return logits


@functools.cache
def gain(name: str) -> float:
    """Relative change of the logits over a relative change of all weights."""
    model, change, tokens = model_named(name), 1e-5, random_tokens(name, 24, seed=5)
    other = load_model(perturbed(model.weights, change, seed=1), model.config)
    return relative_error(teacher_forced(other, tokens)[0], teacher_forced(reference(name), tokens)[0]) / change


@functools.cache
def float32_bound(name: str) -> float:
    config = model_named(name).config
    longest_sum = max(config.hidden_size, config.intermediate_size, config.kda_width, config.shared_intermediate_size)
    return 2 * gain(name) * UNIT["float32"] * (longest_sum + 16) ** 0.5


def random_tokens(name: str, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, model_named(name).config.vocab_size, count).tolist()


def stepped(name: str, tokens: list[int], dtype: str = "float32") -> tuple[np.ndarray, Cache]:
    """The reference token by token: logits and its cache at the end."""
    cache = init_cache(model_named(name).config, 1, 64, jnp.dtype(dtype))
    logits = []
    for token in tokens:
        now, cache = jit_step(reference(name, dtype), jnp.asarray([token]), cache)
        logits.append(np.asarray(now[0]))
    return np.stack(logits), cache


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


# ---- every phase is seen ----


def zeros_like_result(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **named: jax.tree.map(jnp.zeros_like, function(*args, **named))


def unchanged(*_: Any, **__: Any) -> None:
    """In place of a phase that works on buffers."""


def attention_reads_nothing(*args: Any) -> None:
    contexts = args[-1]
    contexts[...] = jnp.zeros(contexts.shape, jnp.float32)


def experts_give_nothing(*args: Any) -> None:
    total = args[-1]
    total[...] = jnp.zeros(total.shape, jnp.float32)


def zeros_are_loaded(out: Any, row: Any, logits: Any, size: int) -> jax.Array:
    logits[...] = jnp.zeros(logits.shape, jnp.float32)
    return jnp.float32(0)


def state_is_not_kept(run_tokens: Callable[..., None]) -> Callable[..., None]:
    def forgetful(plan: Any, rows: Any, query: Any, count: Any, most: Any, keep: bool, *buffers: Any) -> None:
        run_tokens(plan, rows, query, count, most, False, *buffers)

    return forgetful


def without_snapshots(layer_table: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda plan: layer_table(plan).at[:, 7].set(0)


def embedding_is_zero(embed: Callable[..., None]) -> Callable[..., None]:
    def zeroing(step: Any) -> None:
        embed(step)
        for buffer in (step.refs.stream, step.refs.mixture):
            buffer[...] = jnp.zeros(buffer.shape, jnp.float32)

    return zeroing


def no_snapshot_is_mixed(plan: Any, stream: Any, count: Any, weight: Any, mixture: Any, shares: Any) -> None:
    mixture[...] = jnp.zeros(mixture.shape, jnp.float32)
    shares[...] = jnp.zeros(shares.shape, jnp.float32)


def mixture_is_zero(plan: Any, stream: Any, weight: Any, mixture: Any, shares: Any) -> None:
    mixture[...] = jnp.zeros(mixture.shape, jnp.float32)


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


REPLACEMENTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "embed": (megakernel.kernel, "embed", embedding_is_zero),
    "mix_snapshots": (megakernel.kernel, "mix_snapshots", always(no_snapshot_is_mixed)),
    "mix_prefix": (megakernel.kernel, "mix_prefix", always(mixture_is_zero)),
    "mix_prefix leaves the prefix out": (megakernel.kernel, "mix_prefix", always(unchanged)),
    "normalise_prefix": (megakernel.kernel, "normalise_prefix", always(unchanged)),
    "read_mixture": (megakernel.kernel, "read_mixture", zeros_like_result),
    "read_mixture without the norm's weight": (
        megakernel.kernel,
        "read_mixture",
        always(lambda step, norm: step.refs.mixture[...]),
    ),
    "snapshots": (megakernel.kernel, "layer_table", without_snapshots),
    "rms_norm": (layers, "rms_norm", always(lambda x, weight, eps: x)),
    "rms_norm without its weight": (layers, "rms_norm", lambda norm: lambda x, w, eps: norm(x, jnp.ones_like(w), eps)),
    "rms_norm of KDA heads": (kda, "rms_norm", always(lambda x, weight, eps: x)),
    "rms_norm of latents": (mla, "rms_norm", always(lambda x, weight, eps: x)),
    "short_convolution": (kda, "short_convolution", zeros_like_result),
    "short_convolution is the identity": (kda, "short_convolution", always(lambda plan, now, taps, tails: now)),
    "move_tails": (kda, "move_tails", always(unchanged)),
    "log_decay": (kda, "log_decay", zeros_like_result),
    "run_tokens": (kda, "run_tokens", always(unchanged)),
    "run_tokens keeps no state": (kda, "run_tokens", state_is_not_kept),
    "gated_norm": (kda, "gated_norm", zeros_like_result),
    "store_fresh_latents": (mla, "store_fresh_latents", always(lambda *args: attention_reads_nothing(*args))),
    "store_queries": (mla, "store_queries", always(lambda *args: attention_reads_nothing(*args))),
    "attend": (mla, "attend", always(attention_reads_nothing)),
    "merge_fresh": (mla, "merge_fresh", always(lambda plan, entries, *rest: entries)),
    "merge_into_groups": (mla, "merge_into_groups", always(unchanged)),
    "attention_output": (mla, "attention_output", zeros_like_result),
    "attention_output without its gate": (
        mla,
        "attention_output",
        lambda output: lambda plan, values, gate: output(plan, values, None),
    ),
    "activation": (ffn, "activation", zeros_like_result),
    "activation of experts": (experts, "activation", zeros_like_result),
    "expert_weights": (route, "expert_weights", zeros_like_result),
    "expert_weights ignore the bias": (
        route,
        "expert_weights",
        lambda weigh: lambda plan, logits, bias, active: weigh(plan, logits, jnp.zeros_like(bias), active),
    ),
    "start_experts": (route, "start_experts", zeros_like_result),
    "run_experts": (experts, "run_experts", always(experts_give_nothing)),
    "decode_mxfp4": (mxfp4, "decode_mxfp4", zeros_like_result),
    "load_logits": (sample, "load_logits", always(zeros_are_loaded)),
    "choose_token": (sample, "choose_token", zeros_like_result),
    "log_probability": (sample, "log_probability", zeros_like_result),
}


ZEROED = {
    "kda_narrow": r"self_attn\.(b|f_a)_proj",
    "kda_in": r"self_attn\.(q|k|v|g)_proj",
    "kda_decay": r"self_attn\.f_b_proj",
    "kda_out": r"layers\.[012]\.self_attn\.o_proj",
    "mla_low": r"self_attn\.(q_a_proj|kv_a_proj)",
    "mla_in": r"layers\.[34]\.self_attn\.g_proj",
    "mla_query": r"self_attn\.q_b_proj",
    "mla_absorb": r"self_attn\.kv_b_proj",  # key rows
    "mla_value": r"self_attn\.kv_b_proj",  # value rows
    "mla_out": r"layers\.[34]\.self_attn\.o_proj",
    "dense_in": r"mlp\.(gate|up)_proj",
    "dense_out": r"mlp\.down_proj",
    "router": r"block_sparse_moe\.gate\.weight",
    "latent": r"routed_expert_down_proj",
    "shared_in": r"shared_experts\.(gate|up)_proj",
    "shared_out": r"shared_experts\.down_proj",
    "routed_up": r"routed_expert_up_proj",
    "head": r"lm_head",
}
"""The tensors of each streamed product: with zeros in their place it gives zeros, and nothing compiles anew."""


def check(name: str, ask: Ask, ran: Ran) -> None:
    """What every phase must be right for: logits, tokens and log-probabilities of one sequence."""
    expected = stepped(name, ran.fed)[0]
    assert relative_error(ran.logits, expected) < float32_bound(name)
    assert ran.tokens == expected[len(ask.tokens) - 1 :].argmax(-1).tolist()
    log_softmax = np.asarray(jax.nn.log_softmax(expected[len(ask.tokens) - 1 :]))
    chosen = log_softmax[np.arange(len(ran.tokens)), ran.tokens]
    np.testing.assert_allclose(ran.logprobs, chosen, atol=1e-4)


ASK = Ask((7, 45, 300, 122, 9, 17), new=3)
"""Long enough for every cache to matter, in a launch that crosses no page."""


@pytest.fixture
def quick_compile() -> Iterator[None]:
    """Dozens of kernels are compiled here, and each runs for a blink."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_the_kernel_as_it_is_passes_the_check(quick_compile: None) -> None:
    """Without this the next tests would prove nothing."""
    check("k3-mini", ASK, run(anew(model_named("k3-mini")), ASK)[0])


@pytest.mark.slow
@pytest.mark.parametrize("phase", REPLACEMENTS)
def test_check_fails_without(phase: str, monkeypatch: pytest.MonkeyPatch, quick_compile: None) -> None:
    """Each phase replaced by zeros or by nothing, one at a time, makes the comparison red."""
    module, attribute, replacement = REPLACEMENTS[phase]
    monkeypatch.setattr(module, attribute, replacement(getattr(module, attribute)))
    with pytest.raises((AssertionError, NumericsError)):
        check("k3-mini", ASK, run(anew(model_named("k3-mini")), ASK)[0])


@pytest.mark.parametrize("product", ZEROED)
def test_check_fails_without_the_product(product: str) -> None:
    model = model_named("k3-mini")
    check("k3-mini", ASK, run(model, ASK)[0])
    zeroed = anew(model)
    zeroed.weights = {name: without(product, name, tensor) for name, tensor in model.weights.items()}
    assert any(zeroed.weights[name] is not tensor for name, tensor in model.weights.items())
    zeroed.derived = {key: value for key, value in model.derived.items() if key[0] == "launch"}
    (ran,) = run(zeroed, ASK)
    with pytest.raises(AssertionError):
        check("k3-mini", ASK, ran)


def without(product: str, name: str, tensor: np.ndarray) -> np.ndarray:
    if not re.search(ZEROED[product], name):
        return tensor
    config, zeroed = model_named("k3-mini").config, tensor.copy()
    heads = zeroed.reshape(config.num_attention_heads, -1, tensor.shape[-1])
    if product == "mla_absorb":
        heads[:, : config.qk_nope_head_dim] = 0
    elif product == "mla_value":
        heads[:, config.qk_nope_head_dim :] = 0
    else:
        zeroed[...] = 0
    return zeroed


def test_every_product_and_every_phase_has_a_replacement() -> None:
    """A new phase or matrix must be added above."""
    beside_the_router = {"latent"}
    assert set(ZEROED) == set(open_session(model_named("k3-mini")).plan.matrices) | beside_the_router
    replaced = {(module.__name__, attribute) for module, attribute, _ in REPLACEMENTS.values()}
    helpers = {"accumulate", "store_rows", "pad_rows", "argmax", "sortable", "Scratch"}
    helpers |= {"expert_hidden", "expert_output"}
    helpers |= {"RowSampling", "poison"}  # the latter: `test_decode_edges` puts NaN into every tensor
    helpers |= {"load_shards"}  # on several cores only, in place of `load_logits`
    helpers |= {"noise"}  # replaced with `choose_token`
    for module in (kda, mla, route, experts, ffn, sample):
        own = {
            name
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        }
        missing = {name for name in own - helpers if (module.__name__, name) not in replaced}
        assert not missing, f"{module.__name__}: {missing}"
