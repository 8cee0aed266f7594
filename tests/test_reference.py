"""The reference against the official outputs, and its forms against each other.

`tests/data/tiny_stable_mxfp4` is a small random checkpoint in the official Kimi K3 layout with the outputs of the
official PyTorch code; `klinear_layers` holds two layers of a Kimi-Linear one. rms error over rms is under 1e-4 in
float32 if the maths is right (5e-7 is normal) and under 2e-2 in bfloat16 (the official code differs from itself by
5e-3 to 7e-3); every classic mistake lies above the float32 bound, see `test_reference_mistakes.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from model.checkpoint import open_checkpoint
from model.config import ModelConfig
from model.kda import kda_chunkwise, kda_recurrent
from model.reference import (
    Cache,
    Model,
    forward,
    init_cache,
    jit_prefill,
    jit_step,
    load_model,
    model_weights,
    random_weights,
    step,
    stepper,
)
from model.source import below
from model.weights import source_of

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny_stable_mxfp4"
DTYPE = {"f32": jnp.float32, "bf16": jnp.bfloat16}
TOLERANCE = {"f32": 1e-5, "bf16": 2e-2}
PROMPTS = ("p0", "p1", "p2")
MAX_LEN = 48


def error(ours: object, official: np.ndarray) -> float:
    """rms of the difference over rms of the official values."""
    official = np.asarray(official, np.float64)
    return float(np.sqrt(np.mean((np.asarray(ours, np.float64) - official) ** 2) / np.mean(official**2)))


@functools.cache
def reference() -> dict[str, np.ndarray]:
    return load_file(TINY / "ref.safetensors")


@functools.cache
def model(mode: str) -> Model:
    return load_model(open_checkpoint(TINY), ModelConfig.from_file(TINY), DTYPE[mode])


def prompts() -> tuple[np.ndarray, np.ndarray]:
    """The three prompts as one batch, padded on the right with a token that means nothing; and their lengths."""
    rows = [reference()[f"ids.{p}"].astype(np.int32) for p in PROMPTS]
    lengths = np.array([len(row) for row in rows])
    return np.stack([np.pad(row, (0, lengths.max() - len(row)), constant_values=7) for row in rows]), lengths


def check_logits(mode: str, ours: dict[str, np.ndarray]) -> None:
    """Logits of the last tokens of some prompts."""
    agree: list[bool] = []
    for prompt, logits in ours.items():
        official = reference()[f"{mode}.{prompt}.logits_full"][-len(logits) :].astype(np.float32)
        assert error(logits, official) < TOLERANCE[mode]
        agree.extend(logits.argmax(-1) == official.argmax(-1))
    assert np.mean(agree) >= (1.0 if mode == "f32" else 0.9)


def check_states(mode: str, cache: Cache, row: int) -> None:
    """KDA state and convolution tails after the whole of p0."""
    for i, layer in enumerate(model(mode).config.kda_layers):
        assert error(cache.kda_state[i][row], reference()[f"{mode}.p0.kda_state.{layer}"]) < TOLERANCE[mode]
        if mode == "f32":
            tail = np.asarray(cache.conv_tail[i][row]).reshape(3, 3, -1)  # [oldest to newest, q k v, channel]
            assert error(tail.swapaxes(0, 1), reference()[f"f32.p0.conv_state.{layer}"]) < TOLERANCE[mode]


@pytest.mark.parametrize("mode", DTYPE)
def test_forward_reproduces_official_logits(mode: str) -> None:
    tokens, lengths = prompts()
    logits = np.asarray(jax.jit(forward)(model(mode), tokens))
    assert logits.dtype == np.float32
    check_logits(mode, {prompt: logits[row, : lengths[row]] for row, prompt in enumerate(PROMPTS)})


@pytest.mark.parametrize("mode", DTYPE)
def test_step_by_step_reproduces_official_logits_and_states(mode: str) -> None:
    tokens, lengths = prompts()
    cache = init_cache(model(mode).config, 3, MAX_LEN, DTYPE[mode])
    logits = []
    for t in range(tokens.shape[1]):
        now, cache = jit_step(model(mode), tokens[:, t], cache)
        logits.append(np.asarray(now))
    check_logits(mode, {prompt: np.stack(logits)[: lengths[row], row] for row, prompt in enumerate(PROMPTS)})
    check_states(mode, cache, row=0)
    assert cache.length.tolist() == [37, 37, 37]


@pytest.mark.parametrize("mode", DTYPE)
def test_prefill_in_two_padded_pieces_reproduces_official_logits_and_states(mode: str) -> None:
    tokens, lengths = prompts()
    first = np.array([18, 4, 1])
    pieces = np.full((2, 3, 19), 7, np.int32)
    for row in range(3):
        pieces[0, row, : first[row]] = tokens[row, : first[row]]
        pieces[1, row, : lengths[row] - first[row]] = tokens[row, first[row] : lengths[row]]
    cache = init_cache(model(mode).config, 3, MAX_LEN, DTYPE[mode])
    middle, cache = jit_prefill(model(mode), pieces[0], first, cache)
    unchanged = [np.asarray(leaf[2]) for leaf in jax.tree.leaves(cache)]
    last, cache = jit_prefill(model(mode), pieces[1], lengths - first, cache)
    for row, prompt in enumerate(PROMPTS[:2]):
        ours = np.stack([middle[row], last[row]])
        official = reference()[f"{mode}.{prompt}.logits_full"][[first[row] - 1, lengths[row] - 1]]
        assert error(ours, official) < TOLERANCE[mode]
    check_states(mode, cache, row=0)
    assert cache.length.tolist() == lengths.tolist()
    for before, after in zip(unchanged, jax.tree.leaves(cache), strict=True):  # the third row had no second piece
        np.testing.assert_array_equal(before, after[2])


def test_traces_reproduce_official_intermediate_values() -> None:
    def traced(model: Model, tokens: jax.Array) -> dict[str, list[jax.Array]]:
        trace: dict[str, list[jax.Array]] = {}
        forward(model, tokens, trace=trace)
        return trace

    tokens, lengths = prompts()
    trace = jax.jit(traced)(model("f32"), tokens[:1, : lengths[0]])
    ours = {name: [np.asarray(value[0]) for value in values] for name, values in trace.items()}
    for name in ("prefix_sum", "final_hidden", "mla_latent", "mla_krot", "moe_latent_out", "router_margin"):
        assert error(np.stack(ours[name]), reference()[f"f32.p0.trace_{name}"]) < TOLERANCE["f32"], name
    for mix, official in zip(ours["attn_res_probs"], reference()["f32.p0.trace_attn_res_probs"], strict=True):
        assert error(mix, official[:, : mix.shape[-1]]) < TOLERANCE["f32"]
    ids, weights = reference()["f32.p0.trace_topk_idx"], reference()["f32.p0.trace_topk_weight"]
    order, official_order = np.argsort(np.stack(ours["topk_idx"])), np.argsort(ids)  # the official order is unsorted
    np.testing.assert_array_equal(
        np.take_along_axis(np.stack(ours["topk_idx"]), order, -1), np.take_along_axis(ids, official_order, -1)
    )
    ours_weights = np.take_along_axis(np.stack(ours["topk_weight"]), order, -1)
    assert error(ours_weights, np.take_along_axis(weights, official_order, -1)) < TOLERANCE["f32"]


def test_roll_back_leaves_no_trace_of_wrong_tokens() -> None:
    """A rejected draft: recurrent state as before, latents as the wrong tokens left them, length set back."""
    tokens, lengths = prompts()
    k = 18
    piece = np.pad(tokens[:1, :k], ((0, 0), (0, 1)))
    config = model("f32").config
    _, kept = jit_prefill(model("f32"), np.tile(piece, (3, 1)), np.full(3, k), init_cache(config, 3, MAX_LEN))
    cache = jax.tree.map(jnp.copy, kept)
    for wrong in (3, 141, 59, 26):
        _, cache = jit_step(model("f32"), np.full(3, wrong), cache)
    cache = dataclasses.replace(kept, latents=cache.latents)
    logits = []
    for t in range(k, lengths[0]):
        now, cache = jit_step(model("f32"), np.full(3, tokens[0, t]), cache)
        logits.append(np.asarray(now[0]))
    check_logits("f32", {"p0": np.stack(logits)})


@pytest.mark.parametrize("layer", [0, 3])
def test_kimi_linear_layers_reproduce_official_values(layer: int) -> None:
    """Layer 0: KDA with softplus decay and low-rank gate, dense SwiGLU. Layer 3: MLA with full-rank query and no
    gate, experts on the full width with scaled weights. Each becomes a model whose embedding is the layer's input."""
    data = load_file(DATA / "klinear_layers.safetensors")
    full = ModelConfig.from_file(DATA / "klinear_config.json")
    inputs = data[f"ref.layer{layer}.in"]
    config = dataclasses.replace(
        full,
        vocab_size=len(inputs),
        num_hidden_layers=1,
        mla_layers=(0,) if layer == 3 else (),
        first_k_dense_replace=0 if layer == 3 else 1,
        tie_word_embeddings=True,
        eos_token_ids=(0,),
    )
    weights = {
        name.replace(f"model.layers.{layer}.", "model.layers.0."): value
        for name, value in data.items()
        if not name.startswith("ref.") and name.startswith(f"model.layers.{layer}.")
    }
    weights |= {"model.embed_tokens.weight": inputs, "model.norm.weight": np.ones(config.hidden_size, np.float32)}
    one = load_model(weights, config)

    @functools.partial(jax.jit, static_argnames="form")
    def run(one: Model, cache: Cache | None, form: str) -> tuple[jax.Array, Cache]:
        trace: dict[str, list[jax.Array]] = {}
        _, cache = one.hidden(jnp.arange(len(inputs))[None], cache, None, form, trace=trace)
        return trace["prefix_sum"][0][0], cache

    out, cache = run(one, None, "sequence")
    assert error(out, data[f"ref.layer{layer}.out"]) < TOLERANCE["f32"]
    if layer == 0:
        assert error(cache.kda_state[0][0], data["ref.layer0.kda_state"]) < TOLERANCE["f32"]
        tail = np.asarray(cache.conv_tail[0][0]).reshape(3, 3, -1).swapaxes(0, 1)
        assert error(tail, data["ref.layer0.conv_state"]) < TOLERANCE["f32"]
    else:
        official = np.concatenate([data["ref.layer3.mla_latent"], data["ref.layer3.mla_krot"]], axis=-1)
        assert error(cache.latents[0][0], official) < TOLERANCE["f32"]
    if layer == 0:  # in bfloat16 every rounding is where the official code has it
        out, _ = run(load_model(weights, config, jnp.bfloat16), None, "sequence")
        assert error(out, data["ref.layer0.out_bf16"]) < 5e-4
    out, _ = run(one, init_cache(config, 1, len(inputs)), "token")  # recurrent, absorbed, chosen experts only
    assert error(out, data[f"ref.layer{layer}.out"]) < TOLERANCE["f32"]


@functools.partial(jax.jit, static_argnames=("chunk", "bounded"))
def chunkwise(*inputs: jax.Array, chunk: int, bounded: bool) -> tuple[jax.Array, jax.Array]:
    return kda_chunkwise(*inputs, chunk=chunk, bounded=bounded)


def random_kda(tokens: int, decay: str, key: int = 0) -> tuple[jax.Array, ...]:
    """q, k, v, g, beta and a state for two rows and three heads of width 16."""
    rng = np.random.default_rng(key)
    q, k = (rng.standard_normal((2, tokens, 3, 16)).astype(np.float32) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = {"mixed": -5 * rng.random(q.shape), "strongest": np.full(q.shape, -4.999), "none": np.zeros(q.shape)}
    g["unbounded"] = -np.exp(rng.normal(1, 3, q.shape))
    beta = rng.random((2, tokens, 3))
    state = rng.standard_normal((2, 3, 16, 16))
    v = rng.standard_normal(q.shape)
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, g[decay], beta, state))


@pytest.mark.parametrize("decay", ["mixed", "strongest", "none", "unbounded"])
@pytest.mark.parametrize(("tokens", "chunk"), [(50, 16), (33, 32), (5, 8)])
def test_chunkwise_kda_equals_the_recurrence(tokens: int, chunk: int, decay: str) -> None:
    inputs = random_kda(tokens, decay)
    o, state = kda_recurrent(*inputs)
    o_chunk, state_chunk = chunkwise(*inputs, chunk=chunk, bounded=decay != "unbounded")
    assert error(o_chunk, np.asarray(o)) < 1e-5
    assert error(state_chunk, np.asarray(state)) < 1e-5


@pytest.mark.parametrize("decay", ["strongest", "unbounded"])
def test_chunkwise_kda_has_the_gradients_of_the_recurrence(decay: str) -> None:
    inputs = random_kda(32, decay)

    def total(recurrent: bool, *inputs: jax.Array) -> jax.Array:
        o, state = kda_recurrent(*inputs) if recurrent else kda_chunkwise(*inputs, chunk=32, bounded=bounded)
        return jnp.sum(o**2) + jnp.sum(state**2)

    bounded = decay != "unbounded"
    gradient = jax.jit(jax.grad(total, argnums=range(1, 7)), static_argnums=0)
    expected, ours = gradient(True, *inputs), gradient(False, *inputs)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3 * float(jnp.abs(b).max()))


def test_router_gives_ties_to_the_lowest_index() -> None:
    moe = model("f32").layers[1].block_sparse_moe
    router = type(moe.gate)(
        model("f32").config, lambda name: jnp.zeros_like({"weight": moe.gate.weight}.get(name, jnp.zeros(16))[...])
    )
    chosen, weights = router(jnp.ones((5, 128)))
    np.testing.assert_array_equal(chosen, np.tile(np.arange(4), (5, 1)))
    np.testing.assert_allclose(weights, 0.25, rtol=1e-6)


def test_weights_survive_a_round_trip() -> None:
    weights = open_checkpoint(TINY)
    for mode in DTYPE:
        back = model_weights(model(mode))
        assert list(back) == list(weights)
        for name, value in back.items():
            np.testing.assert_array_equal(value, weights[name], err_msg=name)
            assert value.dtype == weights[name].dtype


@pytest.mark.parametrize("preset", ["k3-nano", "k3-mini"])
def test_random_weights_are_reproducible_and_healthy(preset: str) -> None:
    config = ModelConfig.preset(preset)
    weights, again = random_weights(config, 3), random_weights(config, 3)
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    assert any(not np.array_equal(weights[name], other) for name, other in random_weights(config, 4).items())

    @jax.jit
    def run(model: Model, tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        trace: dict[str, list[jax.Array]] = {}
        return forward(model, tokens, trace=trace), trace["prefix_sum"]

    logits, prefixes = run(load_model(weights, config), jnp.arange(12).reshape(2, 6))
    assert 0.3 < float(jnp.std(logits)) < 100
    for values in prefixes:
        assert 0.1 < float(jnp.sqrt(jnp.mean(values**2))) < 30


def test_wrong_weights_are_refused_by_name() -> None:
    config = ModelConfig.preset("k3-mini")
    weights = random_weights(config, 0)
    short = {name: value for name, value in weights.items() if name != "model.layers.2.self_attn.q_proj.weight"}
    with pytest.raises(ValueError, match=r"missing.*model\.layers\.2\.self_attn\.q_proj\.weight"):
        load_model(short, config)
    with pytest.raises(ValueError, match=r"not part of this model.*extra"):
        load_model(weights | {"extra": np.zeros(1)}, config)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(3,\); expected \(128,\)"):
        load_model(weights | {"model.norm.weight": np.zeros(3)}, config)


def test_step_is_pure() -> None:
    """Without donation the cache passed in stays valid: what a caller that keeps old states relies on."""
    config = ModelConfig.preset("k3-mini")
    small = load_model(random_weights(config, 1), config)
    cache = init_cache(config, 1, 8)
    pure_step = jax.jit(step)
    _, after = pure_step(small, jnp.array([5]), cache)
    first, _ = pure_step(small, jnp.array([9]), after)
    second, _ = pure_step(small, jnp.array([9]), after)
    np.testing.assert_array_equal(first, second)
    bound, _ = stepper(small)(jnp.array([9]), jax.tree.map(jnp.copy, after))
    np.testing.assert_array_equal(first, bound)
    assert int(cache.length[0]) == 0
    assert not np.asarray(cache.kda_state[0]).any()


def test_source_serves_names_below_a_prefix() -> None:
    config = ModelConfig.preset("k3-mini")
    weights = random_weights(config, 0)
    source = below(source_of(weights, config, jnp.float32), "model.layers.0.")
    np.testing.assert_array_equal(
        source("self_attn.dt_bias"), weights["model.layers.0.self_attn.dt_bias"].astype(np.float32)
    )
