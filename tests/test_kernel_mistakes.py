"""The comparison with the reference sees every phase: each of them, left out or replaced by zeros, makes it red."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_reference import float32_bound, model_named, stepped
from launching import Ask, Ran, anew, open_session, relative_error, run

import megakernel.kernel
from megakernel import NumericsError, layers
from megakernel.phases import experts, ffn, kda, mla, mxfp4, route, sample


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
    helpers |= {"start_pages"}  # only copies: `test_simulated` takes their waits away
    for module in (kda, mla, route, experts, ffn, sample):
        own = {
            name
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        }
        missing = {name for name in own - helpers if (module.__name__, name) not in replaced}
        assert not missing, f"{module.__name__}: {missing}"
