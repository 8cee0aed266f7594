"""Kimi Delta Attention, one token a row (Kimi Linear report, arXiv 2510.26692, section 3).

Per head, with the state S [key, value] in float32:

    S <- diag(exp g) S;   u = v - S^T k;   S <- S + beta k u^T;   o = S^T q
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megakernel.phases.linear import lanes, rounded, whole_tiles
from megakernel.phases.mix import rms_norm
from megakernel.phases.sums import sum_over_keys
from megakernel.plan import Plan
from megakernel.stream import Ref, Scalar

K, V, DECAY, BETA, RAW_Q, RAW_K, RAW_V, Q = range(8)
"""Planes of the `kda_rows` buffer; replay needs all but the last."""
_L2_EPS = 1e-6


def short_convolution(plan: Plan, projected: jax.Array, taps: jax.Array, tails: Ref) -> jax.Array:
    """Depthwise causal convolution and SiLU over q, k and v side by side.

    Args:
      projected: [rows, 3 * width] f32, this round's values before the convolution.
      taps: [taps, 3 * width] f32; the last tap meets a row's own value.
      tails: [taps - 1, sequences, 3 * width] f32, earlier values, oldest first.
    Returns:
      [rows, 3 * width] f32; padding rows are zero.
    """
    live = projected[: plan.live_rows]
    past = [tails[i] for i in range(len(taps) - 1)]
    history = jnp.concatenate([*past, live], axis=0)  # [(taps - 1 + tokens) * sequences, 3 * width]
    y = jnp.zeros_like(live)
    for i in range(len(taps)):
        y = y + taps[i : i + 1] * history[i * plan.sequences :][: plan.live_rows]
    return pad_rows(plan, rounded(plan, y * jax.nn.sigmoid(y)))


def move_tails(plan: Plan, rows: Ref, taken: jax.Array, tails: Ref) -> None:
    """Moves each sequence's tails on by the tokens it has taken.

    Args:
      rows: [planes, tokens, sequences, width] f32, whose RAW planes hold the values before the convolution.
      taken: [sequences, 1] i32, 0 to `plan.tokens`.
      tails: [taps - 1, sequences, 3 * width] f32.
    """
    raw = [jnp.concatenate([rows[plane, t] for plane in (RAW_Q, RAW_K, RAW_V)], axis=-1) for t in range(plan.tokens)]
    history = [*(tails[i] for i in range(tails.shape[0])), *raw]
    for i in range(tails.shape[0]):
        tail = history[i]
        for count in range(1, plan.tokens + 1):
            tail = jnp.where(taken == count, history[i + count], tail)
        tails[i] = tail


def pad_rows(plan: Plan, x: jax.Array) -> jax.Array:
    """[live rows, n] -> [rows, n], padded with zeros."""
    return whole_tiles([x], plan.rows)


def log_decay(plan: Plan, raw: jax.Array, rate: jax.Array, bias: jax.Array) -> jax.Array:
    """log of the decay of each key channel.  # [rows, width] f32; `rate` is exp(A_log), one number a head, expanded"""
    bound = plan.config.gate_lower_bound
    if bound is None:
        return -rate * jax.nn.softplus(raw + bias)
    return bound * jax.nn.sigmoid(rate * (raw + bias))


def store_rows(
    plan: Plan, projected: jax.Array, convolved: jax.Array, decay: jax.Array, beta: jax.Array, rows: Ref
) -> None:
    """Splits heads, normalises q and k, and spreads beta over each head's lanes.

    Args:
      projected, convolved: [rows, 3 * width] f32, q, k and v before and after the convolution.
      decay: [rows, width] f32 (log); beta: [rows, >= heads] f32 before the sigmoid.
      rows: [planes, tokens, sequences, width] f32, see the plane names.
    """
    dim, width = plan.config.kda_head_dim, plan.split.kda_width
    decay, beta = jnp.exp(decay), jax.nn.sigmoid(beta)
    heads = [slice(h * dim, (h + 1) * dim) for h in range(plan.split.kda_heads)]
    planes = {
        V: convolved[:, 2 * width :],
        DECAY: decay,
        BETA: jnp.concatenate(
            [jnp.broadcast_to(beta[:, h : h + 1], (plan.rows, dim)) for h in range(len(heads))], axis=-1
        ),
        K: jnp.concatenate([_l2_norm(convolved[:, width : 2 * width][:, at]) for at in heads], axis=-1),
        Q: jnp.concatenate([_l2_norm(convolved[:, :width][:, at]) * dim**-0.5 for at in heads], axis=-1),
        RAW_Q: projected[:, :width],
        RAW_K: projected[:, width : 2 * width],
        RAW_V: projected[:, 2 * width :],
    }
    for plane, value in planes.items():
        rows[plane] = value[: plan.live_rows].reshape(plan.tokens, plan.sequences, width)


def _l2_norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _L2_EPS)


def run_tokens(
    plan: Plan, rows: Ref, query: int, count: jax.Array, most: Scalar, keep: bool, state: Ref, trial: Ref, read: Ref
) -> None:
    """The delta rule over tokens 0 to `most - 1`, for every head and sequence, on a copy of the state.

    A token at or past a sequence's count gets decay 1 and beta 0, which leave a state as it is to the bit. First use
    and replay of a row are this same loop on the same kind of buffer, so that no compiler gives them different bits.

    Args:
      rows: [planes, tokens, sequences, width] f32 from `store_rows`; `query`: the plane to read the state with.
      count: [sequences, 1] i32, rows of each sequence that count; most: their maximum.
      keep: whether the copy replaces the state afterwards.
      state: [heads, sequences, key, value] f32; trial: [group * sequences, key, value] f32, scratch; heads go through
        it in groups of `plan.head_group`.
      read: [tokens, sequences, width] f32, receives o.
    """
    dim, group, sequences = plan.config.kda_head_dim, plan.head_group, plan.sequences
    counts_of_group = jnp.concatenate([count] * group, axis=0)  # [group * sequences, 1]

    def head_group(g: Scalar, _: None) -> None:
        first = g * group
        trial[...] = state[pl.ds(first, group)].reshape(trial.shape)

        def token(t: Scalar, _: None) -> None:
            def of_heads(plane: int) -> jax.Array:
                heads = [rows[plane, t, :, lanes((first + i) * dim, dim)] for i in range(group)]
                return jnp.concatenate(heads, axis=0)  # [group * sequences, dim]

            q, k, v, decay, beta = map(of_heads, (query, K, V, DECAY, BETA))
            counts = t < counts_of_group
            decay, beta = jnp.where(counts, decay, 1.0), jnp.where(counts, beta, 0.0)
            s = trial[...] * decay[:, :, None]  # [group * sequences, key, value]
            update = beta * (v - sum_over_keys(s * k[:, :, None]))
            s = s + k[:, :, None] * update[:, None, :]
            trial[...] = s
            out = sum_over_keys(s * q[:, :, None])
            for i in range(group):
                read[t, :, lanes((first + i) * dim, dim)] = out[i * sequences : (i + 1) * sequences]

        lax.fori_loop(0, most, token, None)
        if keep:
            state[pl.ds(first, group)] = trial[...].reshape(group, *state.shape[1:])

    lax.fori_loop(0, plan.split.kda_heads // group, head_group, None)


def gated_norm(plan: Plan, read: jax.Array, gate: jax.Array, weight: jax.Array) -> jax.Array:
    """RMS norm of each head's output times sigmoid(gate).  # all [rows, width] f32; `weight` repeats per head"""
    dim = plan.config.kda_head_dim
    heads = []
    for head in range(plan.split.kda_heads):
        at = slice(head * dim, (head + 1) * dim)
        normed = rms_norm(rounded(plan, read[:, at]), weight[:, at], plan.config.rms_norm_eps)
        heads.append(normed * jax.nn.sigmoid(gate[:, at]))
    return jnp.concatenate(heads, axis=-1)
