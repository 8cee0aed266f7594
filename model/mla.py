"""Multi-head latent attention without positions, with a low-rank query and an output gate as K3 has them.

A position is kept as one latent vector `c` (after its norm) and one extra key `e` that all heads share. Two forms of
the same function: expanded (keys and values of every head are computed from the latents; cheap when many queries
share them) and absorbed (the key matrix moves to the query, the value matrix behind the sum; cheap for one query,
because each latent is read once for all heads).
Shapes: B rows, T new tokens, S positions, H heads, N "nope" and E extra query dimensions, C latent, V value.
Source: DeepSeek-V2 (arXiv 2405.04434) and the code of Kimi K3 and Kimi Linear; no rotation is applied anywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from model.config import ModelConfig
from model.primitives import Trace, einsum_f32, linear, record, rms_norm, rounded
from model.source import Source


class MLA(nnx.Module):
    """One MLA layer's attention, from normed input to output projection."""

    def __init__(self, config: ModelConfig, weights: Source) -> None:
        self.heads, self.latent = config.num_attention_heads, config.kv_lora_rank
        self.nope, self.value = config.qk_nope_head_dim, config.v_head_dim
        self.scale, self.eps = config.qk_head_dim**-0.5, config.mla_latent_norm_eps
        self.low_rank_query, self.gated = config.q_lora_rank is not None, config.mla_use_output_gate
        if self.low_rank_query:
            self.q_a_proj = nnx.Param(weights("q_a_proj.weight"))
            self.q_a_layernorm = nnx.Param(weights("q_a_layernorm.weight"))
            self.q_b_proj = nnx.Param(weights("q_b_proj.weight"))
        else:
            self.q_proj = nnx.Param(weights("q_proj.weight"))
        self.kv_a_proj_with_mqa = nnx.Param(weights("kv_a_proj_with_mqa.weight"))
        self.kv_a_layernorm = nnx.Param(weights("kv_a_layernorm.weight"))
        self.kv_b_proj = nnx.Param(weights("kv_b_proj.weight"))
        if self.gated:
            self.g_proj = nnx.Param(weights("g_proj.weight"))
        self.o_proj = nnx.Param(weights("o_proj.weight"))

    def __call__(
        self,
        x: jax.Array,
        cached: jax.Array | None,
        start: jax.Array,
        lengths: jax.Array | None,
        absorbed: bool,
        trace: Trace | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs T tokens.

        Args:
          x: `[B, T, hidden]`, after the input norm.
          cached: `[B, S, C+E]`, of which the first `start` positions of a row are valid. None: no earlier positions.
          start: `[B]` (or `[1]`), the position of the first token.
          lengths: `[B]`, how many of the T tokens count; the rest are not stored. None: all.
          absorbed: the absorbed form.

        Returns:
          Output `[B, T, hidden]` and the latents, with those of the new tokens in place.
        """
        new = self.latents(x)
        record(trace, "mla_latent", new[..., : self.latent])
        record(trace, "mla_krot", new[..., self.latent :])
        latents = new if cached is None else store(cached, new, start, lengths)
        now = start[:, None] + jnp.arange(x.shape[1])  # [B, T]
        visible = jnp.arange(latents.shape[1]) <= now[..., None]  # [B, T, S]
        attend = self.attend_absorbed if absorbed else self.attend_expanded
        o = attend(self.queries(x), latents.astype(x.dtype), visible)
        if self.gated:
            gate = rounded(jax.nn.sigmoid(linear(x, self.g_proj).astype(jnp.float32)), o.dtype)
            o = rounded(o * gate, o.dtype)
        return linear(o, self.o_proj), latents

    def latents(self, x: jax.Array) -> jax.Array:
        """What the cache keeps of each position, `[B, T, C+E]`: normed latent, then the extra key as it is."""
        both = linear(x, self.kv_a_proj_with_mqa)
        latent = rms_norm(both[..., : self.latent], self.kv_a_layernorm, self.eps)
        return jnp.concatenate([latent, both[..., self.latent :]], axis=-1)

    def queries(self, x: jax.Array) -> jax.Array:
        """`[B, T, H, N+E]`."""
        if self.low_rank_query:
            q = linear(rms_norm(linear(x, self.q_a_proj), self.q_a_layernorm, self.eps), self.q_b_proj)
        else:
            q = linear(x, self.q_proj)
        return q.reshape(*x.shape[:-1], self.heads, -1)

    def attend_expanded(self, q: jax.Array, latents: jax.Array, visible: jax.Array) -> jax.Array:
        """`q [B, T, H, N+E]`, `latents [B, S, C+E]`, `visible [B, T, S]`; `[B, T, H*V]`."""
        kv = linear(latents[..., : self.latent], self.kv_b_proj)
        kv = kv.reshape(*latents.shape[:-1], self.heads, self.nope + self.value)
        keys, values = kv[..., : self.nope], kv[..., self.nope :]
        scores = einsum_f32("bthn,bshn->bhts", q[..., : self.nope], keys)
        scores += einsum_f32("bthe,bse->bhts", q[..., self.nope :], latents[..., self.latent :])
        weights = rounded(self._softmax(scores, visible), q.dtype)
        o = einsum_f32("bhts,bshv->bthv", weights, values)
        return rounded(o, q.dtype).reshape(*q.shape[:2], -1)

    def attend_absorbed(self, q: jax.Array, latents: jax.Array, visible: jax.Array) -> jax.Array:
        """As `attend_expanded`; sums of latents are rounded where they enter the next product."""
        kv_b = self.kv_b_proj[...].reshape(self.heads, self.nope + self.value, self.latent)
        into_keys, out_of_values = kv_b[:, : self.nope], kv_b[:, self.nope :]
        absorbed = rounded(einsum_f32("bthn,hnc->bthc", q[..., : self.nope], into_keys), q.dtype)
        reach = jnp.concatenate([absorbed, q[..., self.nope :]], axis=-1)  # [B, T, H, C+E]
        weights = rounded(self._softmax(einsum_f32("bthc,bsc->bhts", reach, latents), visible), q.dtype)
        context = rounded(einsum_f32("bhts,bsc->bthc", weights, latents[..., : self.latent]), q.dtype)
        o = einsum_f32("bthc,hvc->bthv", context, out_of_values)
        return rounded(o, q.dtype).reshape(*q.shape[:2], -1)

    def _softmax(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.where(visible[:, None], scores * self.scale, -jnp.inf), axis=-1)


def store(cached: jax.Array, new: jax.Array, start: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Writes `new [B, T, W]` into `cached [B, S, W]` from position `start [B]` on; what does not count is dropped."""
    batch, tokens, _ = new.shape
    offset = jnp.arange(tokens)
    position = start[:, None] + offset
    if lengths is not None:
        position = jnp.where(offset < lengths[:, None], position, cached.shape[1])
    return cached.at[jnp.arange(batch)[:, None], position].set(new.astype(cached.dtype), mode="drop")
