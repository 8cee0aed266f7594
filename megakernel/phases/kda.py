"""Kimi Delta Attention, one token a row (Kimi Linear report, arXiv 2510.26692, section 3).

Per head, with the state S [key, value] in float32:

    S <- diag(exp g) S;   u = v - S^T k;   S <- S + beta k u^T;   o = S^T q
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from megakernel.phases.linear import lanes, rounded
from megakernel.phases.mix import rms_norm
from megakernel.plan import Plan
from megakernel.stream import Ref, Scalar

Q, K, V, DECAY, BETA = range(5)
"""Rows of the `kda_rows` buffer."""
_L2_EPS = 1e-6


def short_convolution(plan: Plan, projected: jax.Array, taps: jax.Array, tails: Ref, active: jax.Array) -> jax.Array:
    """Depthwise causal convolution and SiLU over q, k and v side by side; moves the tails of active rows by one token.

    Args:
      projected: [rows, 3 * width] f32, this token's values before the convolution.
      taps: [taps, 3 * width] f32; the last tap meets this token.
      tails: [taps - 1, rows, 3 * width] f32, earlier values, oldest first.
    """
    past = [tails[i] for i in range(len(taps) - 1)]
    window = [*past, projected]
    y = sum((taps[i : i + 1] * value for i, value in enumerate(window)), start=jnp.float32(0))
    for i, value in enumerate(window[1:]):
        tails[i] = jnp.where(active, value, past[i])
    return rounded(plan, y * jax.nn.sigmoid(y))


def log_decay(plan: Plan, raw: jax.Array, rate: jax.Array, bias: jax.Array) -> jax.Array:
    """log of the decay of each key channel.  # [rows, width] f32; `rate` is exp(A_log), one number a head, expanded"""
    bound = plan.config.gate_lower_bound
    if bound is None:
        return -rate * jax.nn.softplus(raw + bias)
    return bound * jax.nn.sigmoid(rate * (raw + bias))


def store_head_rows(
    plan: Plan, convolved: jax.Array, decay: jax.Array, beta: jax.Array, active: jax.Array, rows: Ref
) -> None:
    """Splits heads, normalises q and k, and spreads beta over each head's lanes.

    Rows that are not active get decay 1 and beta 0, which leave a state as it is to the bit.

    Args:
      convolved: [rows, 3 * width] f32; decay: [rows, width] f32 (log); beta: [rows, >= heads] f32 before the sigmoid.
      rows: [5, rows, width] f32, see Q, K, V, DECAY, BETA.
    """
    dim, width = plan.config.kda_head_dim, plan.config.kda_width
    rows[V] = convolved[:, 2 * width :]
    rows[DECAY] = jnp.where(active, jnp.exp(decay), 1.0)
    beta = jnp.where(active, jax.nn.sigmoid(beta), 0.0)
    for head in range(plan.config.kda_num_heads):
        at = slice(head * dim, (head + 1) * dim)
        rows[Q, :, at] = _l2_norm(convolved[:, :width][:, at]) * dim**-0.5
        rows[K, :, at] = _l2_norm(convolved[:, width : 2 * width][:, at])
        rows[BETA, :, at] = jnp.broadcast_to(beta[:, head : head + 1], (plan.rows, dim))


def _l2_norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPS)


def recurrence(plan: Plan, rows: Ref, state: Ref, read: Ref) -> None:
    """One step of the delta rule for every head and sequence.

    Args:
      rows: [5, rows, width] f32 from `store_head_rows`.
      state: [heads, sequences, key, value] f32, updated in place.
      read: [rows, width] f32, receives o; rows past the sequences are left as they are.
    """
    dim, sequences = plan.config.kda_head_dim, plan.sequences

    def head(h: Scalar, _: None) -> None:
        at = lanes(h * dim, dim)
        q, k, v, decay, beta = (rows[i, :sequences, at] for i in (Q, K, V, DECAY, BETA))  # [sequences, dim]
        s = state[h] * decay[:, :, None]  # [sequences, key, value]
        update = beta * (v - sum_over_keys(s * k[:, :, None]))
        s = s + k[:, :, None] * update[:, None, :]
        state[h] = s
        read[:sequences, at] = sum_over_keys(s * q[:, :, None])

    lax.fori_loop(0, plan.config.kda_num_heads, head, None)


def sum_over_keys(x: jax.Array) -> jax.Array:
    """Sum over the middle axis by halves, an order that no compiler chooses.  # [sequences, key, value] f32"""
    while x.shape[1] > 8 and x.shape[1] % 2 == 0:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    total = x[:, 0]
    for key in range(1, x.shape[1]):  # a reduction would choose its order by the number of sequences
        total = total + x[:, key]
    return total


def gated_norm(plan: Plan, read: jax.Array, gate: jax.Array, weight: jax.Array) -> jax.Array:
    """RMS norm of each head's output times sigmoid(gate).  # all [rows, width] f32; `weight` repeats per head"""
    dim = plan.config.kda_head_dim
    heads = []
    for head in range(plan.config.kda_num_heads):
        at = slice(head * dim, (head + 1) * dim)
        normed = rms_norm(rounded(plan, read[:, at]), weight[:, at], plan.config.rms_norm_eps)
        heads.append(normed * jax.nn.sigmoid(gate[:, at]))
    return jnp.concatenate(heads, axis=-1)
