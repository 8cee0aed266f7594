"""What a model keeps of a sequence between tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from model.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """State of B independent rows; a pytree.

    kda_state: per KDA layer `[B, H, K, V]` float32.
    conv_tail: per KDA layer `[B, taps-1, 3*H*K]`: the last inputs of the convolutions, q | k | v, oldest first.
    latents: per MLA layer `[B, max_len, kv_lora_rank + extra]`; a row is valid up to its length, garbage beyond.
    length: `[B]` int32, tokens seen.
    """

    kda_state: tuple[jax.Array, ...]
    conv_tail: tuple[jax.Array, ...]
    latents: tuple[jax.Array, ...]
    length: jax.Array

    @property
    def max_len(self) -> int | None:
        """Positions that fit, or None if the model has no MLA layer."""
        return self.latents[0].shape[1] if self.latents else None


def init_cache(config: ModelConfig, batch: int, max_len: int, dtype: DTypeLike = jnp.float32) -> Cache:
    """An empty cache. `dtype` is the activation dtype of the model; the recurrent state is float32 in any case."""
    heads, width = config.kda_num_heads, config.kda_head_dim
    tail = (batch, config.short_conv_kernel_size - 1, 3 * config.kda_width)
    return Cache(
        kda_state=tuple(jnp.zeros((batch, heads, width, width), jnp.float32) for _ in config.kda_layers),
        conv_tail=tuple(jnp.zeros(tail, dtype) for _ in config.kda_layers),
        latents=tuple(jnp.zeros((batch, max_len, config.mla_latent_width), dtype) for _ in config.mla_layers),
        length=jnp.zeros((batch,), jnp.int32),
    )
