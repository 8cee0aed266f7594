"""Gated activations of the feed-forward networks: SiTU-GLU (Kimi K3 report) and SwiGLU (arXiv 2002.05202)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from megakernel.phases.linear import rounded
from megakernel.plan import Plan


def activation(plan: Plan, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Elementwise on float32; SiTU rounds once, at the end, SwiGLU also after the SiLU, as the official code does."""
    config = plan.config
    if config.hidden_act == "silu":
        return rounded(plan, rounded(plan, gate * jax.nn.sigmoid(gate)) * up)
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    soft_gate = beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate)
    return rounded(plan, soft_gate * (linear_beta * jnp.tanh(up / linear_beta)))
