"""The exact model in plain JAX: oracle of the kernel, prefill, and what training differentiates.

    model = load_model(weights, config, jnp.bfloat16)
    logits = forward(model, tokens)                                   # [B, T] -> [B, T, V]
    logits, cache = prefill(model, tokens, lengths, init_cache(config, batch, max_len, jnp.bfloat16))
    logits, cache = jit_step(model, next_tokens, cache)               # [B] -> [B, V]

The configuration decides between the Kimi K3 and the Kimi Linear architecture. Written independently of any kernel.
Functions are pure and can be jitted; `Model` is a pytree, so it can be an argument of a jitted function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from model.cache import Cache, init_cache
from model.config import ModelConfig
from model.kda import KDA
from model.mla import MLA
from model.moe import FFN, MoE
from model.primitives import Trace, linear_f32, record, rms_norm
from model.residual import ResidualStream
from model.source import Source, below
from model.weights import model_weights, random_weights, source_of

__all__ = [
    "Cache", "Model", "Trace", "forward", "init_cache", "jit_prefill", "jit_step", "load_model", "model_weights",
    "prefill", "random_weights", "step", "stepper",
]  # fmt: skip

Form = Literal["sequence", "token"]


class Layer(nnx.Module):
    """One layer's parameters; `Model` runs them."""

    def __init__(self, config: ModelConfig, layer: int, weights: Source) -> None:
        self.writes_snapshot = config.writes_snapshot(layer)
        self.input_layernorm = nnx.Param(weights("input_layernorm.weight"))
        self.post_attention_layernorm = nnx.Param(weights("post_attention_layernorm.weight"))
        if config.attn_res_block_size:
            self.self_attention_res_norm = nnx.Param(weights("self_attention_res_norm.weight"))
            self.self_attention_res_proj = nnx.Param(weights("self_attention_res_proj.weight"))
            self.mlp_res_norm = nnx.Param(weights("mlp_res_norm.weight"))
            self.mlp_res_proj = nnx.Param(weights("mlp_res_proj.weight"))
        attention = KDA if config.layer_kind(layer) == "kda" else MLA
        self.self_attn: KDA | MLA = attention(config, below(weights, "self_attn."))
        if config.is_moe(layer):
            self.block_sparse_moe = MoE(config, below(weights, "block_sparse_moe."))
        else:
            self.mlp = FFN(config, below(weights, "mlp."))

    def feed_forward(self, x: jax.Array, chosen_only: bool, trace: Trace | None) -> jax.Array:
        if hasattr(self, "mlp"):
            return self.mlp(x)
        return self.block_sparse_moe(x, chosen_only, trace)


class Model(nnx.Module):
    """A decoder of the Kimi K3 class.

    Args:
      config: the architecture.
      dtype: of activations and of the parameters that checkpoints store as BF16; float32 or bfloat16.
      source: where tensors come from; None draws `random_weights(config, 0)`. See `load_model`.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike = jnp.float32, source: Source | None = None) -> None:
        weights = source or source_of(random_weights(config, 0), config, dtype)
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.attention_residuals = config.attn_res_block_size > 0
        self.embed_tokens = nnx.Param(weights("model.embed_tokens.weight"))
        self.layers = nnx.List(
            [
                Layer(config, layer, below(weights, f"model.layers.{layer}."))
                for layer in range(config.num_hidden_layers)
            ]
        )
        self.norm = nnx.Param(weights("model.norm.weight"))
        if self.attention_residuals:
            self.output_attn_res_norm = nnx.Param(weights("model.output_attn_res_norm.weight"))
            self.output_attn_res_proj = nnx.Param(weights("model.output_attn_res_proj.weight"))
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(weights("lm_head.weight"))

    def hidden(
        self,
        tokens: jax.Array,
        cache: Cache | None,
        lengths: jax.Array | None,
        form: Form,
        chunk: int = 16,
        trace: Trace | None = None,
    ) -> tuple[jax.Array, Cache]:
        """All layers: `tokens [B, T]` to the normed hidden state `[B, T, hidden]` that the LM head reads.

        `cache` None: the tokens are whole sequences; the cache returned then holds their latents unpadded.
        `form` "sequence": chunkwise KDA, expanded MLA, all experts; "token": recurrent, absorbed, chosen experts.
        """
        decode = form == "token"
        before = cache or init_cache(self.config, tokens.shape[0], 0, self.dtype)
        start = cache.length if cache else jnp.zeros((1,), jnp.int32)
        states, tails, latents = list(before.kda_state), list(before.conv_tail), list(before.latents)
        kda, mla = 0, 0
        stream = ResidualStream(self.embed_tokens[...][tokens], self.config.rms_norm_eps, trace)
        for layer in self.layers:
            h = self._read(stream, layer, "self_attention_res") if stream.snapshots else stream.prefix
            record(trace, "attn_in", h)
            if layer.writes_snapshot:
                stream.freeze()
            x = rms_norm(h, layer.input_layernorm, self.config.rms_norm_eps)
            attention = layer.self_attn
            if isinstance(attention, KDA):
                a, states[kda], tails[kda] = attention(x, states[kda], tails[kda], lengths, decode, chunk)
                kda += 1
            else:
                old = latents[mla] if cache else None
                a, latents[mla] = attention(x, old, start, lengths, decode, trace)
                mla += 1
            stream.add(a)
            record(trace, "attn_out", a)

            h = self._read(stream, layer, "mlp_res")
            record(trace, "mlp_in", h)
            f = layer.feed_forward(rms_norm(h, layer.post_attention_layernorm, self.config.rms_norm_eps), decode, trace)
            stream.add(f)
            record(trace, "mlp_out", f)
            record(trace, "prefix_sum", stream.prefix)
        h = self._read(stream, self, "output_attn_res")
        record(trace, "final_hidden", h)
        count = tokens.shape[1] if lengths is None else lengths
        after = Cache(tuple(states), tuple(tails), tuple(latents), before.length + count)
        return rms_norm(h, self.norm, self.config.rms_norm_eps), after

    def logits(self, hidden: jax.Array) -> jax.Array:
        """`hidden [..., hidden]`, normed, to float32 logits `[..., V]`: the sums as they are, never rounded."""
        return linear_f32(hidden, self.embed_tokens if self.config.tie_word_embeddings else self.lm_head)

    def _read(self, stream: ResidualStream, owner: nnx.Module, name: str) -> jax.Array:
        if not self.attention_residuals:
            return stream.prefix
        return stream.read(getattr(owner, f"{name}_norm"), getattr(owner, f"{name}_proj"))


def load_model(weights: Mapping[str, np.ndarray], config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Model:
    """Builds a model from the tensors of `model.layout.tensor_specs(config)`.

    BF16 tensors become parameters of `dtype` (same values), F32 tensors stay float32, MXFP4 experts are decoded.

    Raises:
      ValueError: a tensor is missing, unknown or of the wrong shape; the message names it.
    """
    return Model(config, dtype, source_of(weights, config, dtype))


def forward(model: Model, tokens: jax.Array, *, chunk: int = 16, trace: Trace | None = None) -> jax.Array:
    """Logits `[B, T, V]` float32 after every token of `tokens [B, T]`; rows are whole sequences."""
    hidden, _ = model.hidden(tokens, None, None, "sequence", chunk, trace)
    return model.logits(hidden)


def prefill(
    model: Model,
    tokens: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    *,
    chunk: int = 16,
    trace: Trace | None = None,
) -> tuple[jax.Array, Cache]:
    """Runs prompts, or further parts of them, by chunks.

    Args:
      model: the model.
      tokens: `[B, T]`, padded on the right with any valid id.
      lengths: `[B]`, tokens of each row that count; 0 leaves a row as it is (its logits then mean nothing).
      cache: empty or not; `cache.length + lengths` may not exceed its `max_len` (what does not fit is dropped).

    Returns:
      Logits `[B, V]` float32 after each row's last token, and the new cache.
    """
    hidden, cache = model.hidden(tokens, cache, lengths, "sequence", chunk, trace)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    return model.logits(jnp.take_along_axis(hidden, last, axis=1)[:, 0]), cache


def step(model: Model, tokens: jax.Array, cache: Cache, *, trace: Trace | None = None) -> tuple[jax.Array, Cache]:
    """One token per row: `tokens [B]` to logits `[B, V]` float32 and the new cache."""
    hidden, cache = model.hidden(tokens[:, None], cache, None, "token", trace=trace)
    return model.logits(hidden[:, 0]), cache


jit_prefill = jax.jit(prefill, donate_argnames="cache", static_argnames="chunk")
"""`prefill`, compiled; the cache passed in is consumed."""

jit_step = jax.jit(step, donate_argnames="cache")
"""`step`, compiled; the cache passed in is consumed."""


def stepper(model: Model) -> Callable[[jax.Array, Cache], tuple[jax.Array, Cache]]:
    """`jit_step` with the model bound once, for loops in which handing over its many tensors would cost time.

    The cache passed in is consumed. Later changes of the model's parameters are not seen.
    """
    leaves, tree = jax.tree.flatten(model)
    return functools.partial(_bound_step, tree, leaves)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _bound_step(
    tree: jax.tree_util.PyTreeDef, leaves: list[jax.Array], tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    return step(jax.tree.unflatten(tree, leaves), tokens, cache)
