"""Prompts through the reference model: the chunkwise form, then its cache in the kernel's layout.

A chunk has one fixed length, so one compilation serves every prompt; each sequence is run alone, so that its numbers do
not depend on what else is decoded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from tqdm import tqdm

from megakernel.loading import LoadedModel
from megakernel.plan import Plan
from megakernel.program import LANES, round_up
from model.reference import Cache, Model, init_cache, jit_prefill, load_model

CHUNK = 256
"""Tokens of one call of the reference."""
Arrays = dict[str, jax.Array]


def reference_model(model: LoadedModel, activations: str) -> Model:
    """The reference with this model's weights, built once."""
    key = ("reference", activations)
    if key not in model.derived:
        model.derived[key] = load_model(model.weights, model.config, jnp.dtype(activations))
    return model.derived[key]


def run_prompt(model: LoadedModel, activations: str, tokens: Sequence[int], max_len: int) -> tuple[jax.Array, Cache]:
    """Runs a whole prompt; returns the logits after its last token [1, V] and the cache of one row."""
    reference = reference_model(model, activations)
    cache = init_cache(model.config, 1, round_up(max_len, CHUNK), jnp.dtype(activations))
    logits = jnp.zeros((1, model.config.vocab_size))
    starts = range(0, len(tokens), CHUNK)
    for start in tqdm(starts, desc="prompt", unit="chunk", disable=None if len(starts) > 8 else True, leave=False):
        part = list(tokens[start : start + CHUNK])
        padded = jnp.array([part + [0] * (CHUNK - len(part))], jnp.int32)
        logits, cache = jit_prefill(reference, padded, jnp.array([len(part)], jnp.int32), cache)
    return logits, cache


def prefill_slot(model: LoadedModel, plan: Plan, caches: Arrays, slot: int, tokens: Sequence[int]) -> Arrays:
    """The kernel's caches with slot `slot` as if the kernel had run `tokens` from position 0."""
    _, cache = run_prompt(model, plan.activations, tokens, plan.context)
    return _install(plan, caches, cache, jnp.int32(slot))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _install(plan: Plan, caches: Arrays, cache: Cache, slot: jax.Array) -> Arrays:
    caches = dict(caches)
    if cache.kda_state:
        states = jnp.stack([state[0] for state in cache.kda_state])  # [layers, heads, key, value]
        caches["states"] = caches["states"].at[:, :, slot].set(states)
        tails = jnp.stack([tail[0] for tail in cache.conv_tail])  # [layers, taps - 1, 3 * width]
        caches["conv_tails"] = caches["conv_tails"].at[:, :, slot].set(tails.astype(jnp.float32))
    if cache.latents:
        rank = plan.config.kv_lora_rank
        latents = jnp.stack([latent[0, : plan.context] for latent in cache.latents])  # [layers, context, rank + extra]
        positions = latents.shape[1]
        padded = jnp.zeros((latents.shape[0], positions, plan.latent_lanes), latents.dtype)
        padded = padded.at[:, :, :rank].set(latents[:, :, :rank])
        padded = jax.lax.dynamic_update_slice(padded, latents[:, :, rank:], (0, 0, round_up(rank, LANES)))
        caches["latents"] = caches["latents"].at[:, slot, :positions].set(padded.astype(caches["latents"].dtype))
    return caches
