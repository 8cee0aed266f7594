"""Feed-forward parts: the dense FFN, the router, and the latent mixture of experts with shared experts.

Shapes: `...` any leading dimensions (tokens), D hidden, L the width on which routed experts work (the latent of K3, or
D itself), F their inner width, E experts, k experts per token.
Source: the code of Kimi K3 and Kimi Linear; routing is DeepSeek-V3's sigmoid router without auxiliary loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from model.config import ModelConfig
from model.primitives import HIGHEST, Trace, linear, linear_f32, record, rms_norm, rounded, situ_glu, swi_glu
from model.source import Source, below

GatedActivation = Callable[[jax.Array, jax.Array], jax.Array]


def _einsum(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """A linear map for each expert: float32 sums, one rounding."""
    return rounded(jnp.einsum(equation, x, weight, precision=HIGHEST), x.dtype)


def gated_activation(config: ModelConfig) -> GatedActivation:
    if config.hidden_act == "silu":
        return swi_glu
    return functools.partial(situ_glu, beta=config.activation_situ_beta, linear_beta=config.activation_situ_linear_beta)


class FFN(nnx.Module):
    """`down(act(gate x, up x))`; dense layers and shared experts."""

    def __init__(self, config: ModelConfig, weights: Source) -> None:
        self.activation = gated_activation(config)
        self.gate_proj = nnx.Param(weights("gate_proj.weight"))
        self.up_proj = nnx.Param(weights("up_proj.weight"))
        self.down_proj = nnx.Param(weights("down_proj.weight"))

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(self.activation(linear(x, self.gate_proj), linear(x, self.up_proj)), self.down_proj)


class Router(nnx.Module):
    """Chooses k experts per token and their weights."""

    def __init__(self, config: ModelConfig, weights: Source) -> None:
        self.top_k, self.renormalize = config.num_experts_per_token, config.moe_renormalize
        self.scaling = config.routed_scaling_factor
        self.weight = nnx.Param(weights("weight"))
        self.e_score_correction_bias = nnx.Param(weights("e_score_correction_bias"))

    def __call__(self, x: jax.Array, trace: Trace | None = None) -> tuple[jax.Array, jax.Array]:
        """`x [..., D]` to expert ids `[..., k]` int32, best first, and their weights `[..., k]` float32.

        The bias decides who is chosen, never the weight; equal scores go to the lowest id.
        """
        scores = jax.nn.sigmoid(linear_f32(x, self.weight))
        biased = scores + self.e_score_correction_bias[...]
        best, chosen = lax.top_k(biased, self.top_k)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.renormalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        weights = weights * self.scaling
        if trace is not None and self.top_k < biased.shape[-1]:
            record(trace, "router_margin", best[..., -1] - lax.top_k(biased, self.top_k + 1)[0][..., -1])
        record(trace, "topk_idx", chosen)
        record(trace, "topk_weight", weights)
        return chosen, weights


class MoE(nnx.Module):
    """Router, routed experts (on the latent if the model has one) and shared experts."""

    def __init__(self, config: ModelConfig, weights: Source) -> None:
        self.num_experts, self.eps = config.num_experts, config.rms_norm_eps
        self.latent, self.latent_norm = config.latent_experts, config.latent_moe_use_norm
        self.shared = config.num_shared_experts > 0
        self.activation = gated_activation(config)
        self.gate = Router(config, below(weights, "gate."))
        if self.latent:
            self.routed_expert_down_proj = nnx.Param(weights("routed_expert_down_proj.weight"))
            self.routed_expert_up_proj = nnx.Param(weights("routed_expert_up_proj.weight"))
        if self.latent_norm:
            self.routed_expert_norm = nnx.Param(weights("routed_expert_norm.weight"))
        if self.shared:
            self.shared_experts = FFN(config, below(weights, "shared_experts."))
        self.w1 = nnx.Param(weights("experts.w1"))  # gate [E, F, L]
        self.w2 = nnx.Param(weights("experts.w2"))  # down [E, L, F]
        self.w3 = nnx.Param(weights("experts.w3"))  # up   [E, F, L]

    def __call__(self, x: jax.Array, chosen_only: bool, trace: Trace | None = None) -> jax.Array:
        """`x [..., D]`, normed, to `[..., D]`.

        `chosen_only` reads only the chosen experts, once for each token: right for few tokens. Otherwise every expert
        sees every token: the fewest operations on a device, and right for many tokens.
        """
        chosen, weights = self.gate(x, trace)
        z = linear(x, self.routed_expert_down_proj) if self.latent else x
        routed = (self._chosen_only if chosen_only else self._all_experts)(z, chosen, weights)
        record(trace, "moe_latent_out", routed)
        if self.latent_norm:
            routed = rms_norm(routed, self.routed_expert_norm, self.eps)
        out = linear(routed, self.routed_expert_up_proj) if self.latent else routed
        return rounded(out + self.shared_experts(x), x.dtype) if self.shared else out

    def _all_experts(self, z: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        is_chosen = chosen[..., None] == jnp.arange(self.num_experts)  # [..., k, E]
        combine = jnp.sum(jnp.where(is_chosen, weights[..., None], 0.0), axis=-2)  # [..., E]
        gate, up = (_einsum("...l,efl->...ef", z, w[...]) for w in (self.w1, self.w3))
        each = _einsum("...ef,elf->...el", self.activation(gate, up), self.w2[...])
        return rounded(jnp.sum(each.astype(jnp.float32) * combine[..., None], axis=-2), z.dtype)

    def _chosen_only(self, z: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        """One (token, expert) pair after the other: reads each chosen expert where it lies."""
        stacks, experts = [w[...] for w in (self.w1, self.w2, self.w3)], chosen.reshape(-1)
        if z.dtype == jnp.bfloat16:  # a CPU would convert whole stacks to float32 before the loop; gathers it does not
            stacks, experts = [w[experts] for w in stacks], jnp.arange(experts.size)

        def pair(token_and_expert: tuple[jax.Array, jax.Array]) -> jax.Array:
            token, expert = token_and_expert
            w1, w2, w3 = (lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in stacks)
            return linear(self.activation(linear(token, w1), linear(token, w3)), w2)

        by_pair = jnp.repeat(z.reshape(-1, 1, z.shape[-1]), chosen.shape[-1], axis=0)  # [tokens * k, 1, L]
        each = lax.map(pair, (by_pair, experts)).reshape(*chosen.shape, -1)  # [..., k, L]
        return rounded(jnp.sum(each.astype(jnp.float32) * weights[..., None], axis=-2), z.dtype)
