"""Models beside the flax reference on the same weights, and how far the kernel may be from it.

**Bound in float32.** Products and sums of float32 numbers are rounded; a sum over k terms equals the exact sum with
every term changed by a relative error of about sqrt(k) u, u = 2^-24 (Higham and Mary, SIAM J. Sci. Comput. 41, 2019:
roundings are as good as independent), and the few roundings of a norm or a gate add to that like more terms. So a
float32 run behaves like an exact run whose weights are changed by sqrt(k) u. How much such a change moves the logits is
measured on the reference itself: `gain` is the relative change of the logits over a relative change of every weight.
Kernel and reference err independently, each by gain sqrt(k) u; the bound is their sum. It comes out at 1e-5 for
`k3-mini` and 5e-6 for `k3-nano`; what is measured is about an eighth of it.

**Bound in bfloat16.** Activations are rounded to u = 2^-8 instead, about four times between one weight matrix and the
next (sum, gate, norm and its weight): bound 2 gain sqrt(4) u. Which experts a token takes must not depend on a
rounding, so the tokens are chosen such that the router's margins are wide.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from launching import DATA, perturbed, random_model, relative_error

from megakernel import LoadedModel, load
from model.config import ModelConfig
from model.reference import Cache, forward, init_cache, jit_step, load_model, random_weights

CONTEXT = 320
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


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
