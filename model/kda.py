"""Kimi Delta Attention: linear attention with a decay for every key channel and a delta rule.

Per head the state `S [K, V]` is a matrix of fast weights. One token decays it, asks what it already answers to the
key, writes the difference, and is read by the query:

    S <- diag(exp g) S;   u = v - S^T k;   S <- S + beta k u^T;   o = S^T q

Two forms of the same function: `kda_recurrent` is the definition, `kda_chunkwise` turns a chunk of tokens into
matrix products. Shapes: B rows, T tokens, H heads, K and V numbers per head (equal). All of it runs in float32.
Source: Kimi Linear technical report (arXiv 2510.26692) and the code of Kimi K3.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from model.config import ModelConfig
from model.primitives import HIGHEST, Weight, l2_norm, linear, rounded
from model.source import Source

_einsum = functools.partial(jnp.einsum, precision=HIGHEST)


class KDA(nnx.Module):
    """One KDA layer's attention, from normed input to output projection."""

    def __init__(self, config: ModelConfig, weights: Source) -> None:
        self.heads, self.head_dim = config.kda_num_heads, config.kda_head_dim
        self.lower_bound, self.eps = config.gate_lower_bound, config.rms_norm_eps
        self.full_rank_gate = config.use_full_rank_gate
        self.q_proj = nnx.Param(weights("q_proj.weight"))
        self.k_proj = nnx.Param(weights("k_proj.weight"))
        self.v_proj = nnx.Param(weights("v_proj.weight"))
        self.q_conv1d = nnx.Param(weights("q_conv1d.weight"))
        self.k_conv1d = nnx.Param(weights("k_conv1d.weight"))
        self.v_conv1d = nnx.Param(weights("v_conv1d.weight"))
        self.f_a_proj = nnx.Param(weights("f_a_proj.weight"))
        self.f_b_proj = nnx.Param(weights("f_b_proj.weight"))
        self.b_proj = nnx.Param(weights("b_proj.weight"))
        if self.full_rank_gate:
            self.g_proj = nnx.Param(weights("g_proj.weight"))
        else:
            self.g_a_proj = nnx.Param(weights("g_a_proj.weight"))
            self.g_b_proj = nnx.Param(weights("g_b_proj.weight"))
        self.A_log = nnx.Param(weights("A_log"))
        self.dt_bias = nnx.Param(weights("dt_bias"))
        self.o_norm = nnx.Param(weights("o_norm.weight"))
        self.o_proj = nnx.Param(weights("o_proj.weight"))

    def __call__(
        self, x: jax.Array, state: jax.Array, tail: jax.Array, lengths: jax.Array | None, recurrent: bool, chunk: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs T tokens.

        Args:
          x: `[B, T, hidden]`, after the input norm.
          state: `[B, H, K, V]` float32, before the first token.
          tail: `[B, taps-1, 3*H*K]`, the last inputs of the convolutions (q | k | v), oldest first.
          lengths: `[B]`, how many of the T tokens count; the rest leave state and tail alone. None: all.
          recurrent: token by token instead of by chunks.
          chunk: tokens per chunk.

        Returns:
          Output `[B, T, hidden]`, state and tail after the last token that counts.
        """
        qkv = jnp.concatenate([linear(x, w) for w in (self.q_proj, self.k_proj, self.v_proj)], axis=-1)
        taps = jnp.concatenate([w[...] for w in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        history = jnp.concatenate([tail.astype(qkv.dtype), qkv], axis=1)  # [B, taps-1+T, 3*H*K]
        mixed = short_convolution(history, taps)
        q, k, v = (self._by_head(part) for part in jnp.split(mixed, 3, axis=-1))  # [B, T, H, K]
        q, k, v = l2_norm(q) * self.head_dim**-0.5, l2_norm(k), v.astype(jnp.float32)

        raw = self._by_head(linear(linear(x, self.f_a_proj), self.f_b_proj).astype(jnp.float32))
        g = log_decay(raw, self.A_log, self.dt_bias[...].reshape(self.heads, -1), self.lower_bound)
        beta = jax.nn.sigmoid(linear(x, self.b_proj).astype(jnp.float32))  # [B, T, H]
        if lengths is not None:  # a token that does not count neither decays nor writes
            counts = jnp.arange(x.shape[1]) < lengths[:, None]
            g, beta = jnp.where(counts[..., None, None], g, 0.0), jnp.where(counts[..., None], beta, 0.0)

        if recurrent:
            o, state = kda_recurrent(q, k, v, g, beta, state)
        else:
            o, state = kda_chunkwise(q, k, v, g, beta, state, chunk, bounded=self.lower_bound is not None)
        y = linear(self._gated_norm(rounded(o, x.dtype), x), self.o_proj)
        return y, state, _last_rows(history, tail.shape[1], lengths).astype(tail.dtype)

    def _by_head(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.heads, self.head_dim)

    def _gated_norm(self, o: jax.Array, x: jax.Array) -> jax.Array:
        """`o / rms(o) * w * sigmoid(gate(x))` per head in float32, one rounding; `[B, T, H*V]`."""
        gate = linear(x, self.g_proj) if self.full_rank_gate else linear(linear(x, self.g_a_proj), self.g_b_proj)
        wide = o.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps) * self.o_norm[...]
        z = normed * jax.nn.sigmoid(self._by_head(gate).astype(jnp.float32))
        return rounded(z, o.dtype).reshape((*x.shape[:-1], -1))


def short_convolution(history: jax.Array, taps: jax.Array) -> jax.Array:
    """Depthwise causal convolution, then SiLU: `history [B, n-1+T, C]`, `taps [C, 1, n]` (the last is now's).

    Returns `[B, T, C]`: float32 sums, one rounding.
    """
    n = taps.shape[-1]
    tokens = history.shape[1] - (n - 1)
    wide = history.astype(jnp.float32)
    y = sum(taps[:, 0, j] * wide[:, j : j + tokens] for j in range(n))
    return rounded(jax.nn.silu(y), history.dtype)


def log_decay(raw: jax.Array, a_log: Weight, dt_bias: jax.Array, lower_bound: float | None) -> jax.Array:
    """Logarithm of the decay, `[..., H, K]`; `raw [..., H, K]`, `a_log [H]`, `dt_bias [H, K]`, all float32.

    With a lower bound `lower_bound * sigmoid(exp(a) (raw + bias))` (K3), without `-exp(a) softplus(raw + bias)`.
    """
    a = jnp.exp(a_log[...])[:, None]
    if lower_bound is None:
        return -a * jax.nn.softplus(raw + dt_bias)
    return lower_bound * jax.nn.sigmoid(a * (raw + dt_bias))


def kda_update(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token: `q, k, g [B, H, K]`, `v [B, H, V]`, `beta [B, H]`, `state [B, H, K, V]`; returns output and state."""
    state = jnp.exp(g)[..., None] * state
    u = v - _einsum("bhk,bhkv->bhv", k, state)
    state = state + (beta[..., None] * k)[..., None] * u[..., None, :]
    return _einsum("bhk,bhkv->bhv", q, state), state


def kda_recurrent(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Token by token, the definition: `q, k, v, g [B, T, H, K]`, `beta [B, T, H]`; output `[B, T, H, V]` and state."""
    if q.shape[1] == 1:
        o, state = kda_update(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
        return o[:, None], state

    def body(carry: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = token
        o, carry = kda_update(q, k, v, g, beta, carry)
        return carry, o

    by_token = tuple(jnp.moveaxis(t, 1, 0) for t in (q, k, v, g, beta))
    state, o = lax.scan(body, state, by_token)
    return jnp.moveaxis(o, 0, 1), state


def kda_chunkwise(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    chunk: int = 16,
    bounded: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The same as `kda_recurrent`, by chunks of `chunk` tokens (a power of two).

    Inside a chunk, with G_t the sum of g up to and including t and S the state before the chunk, the written rows
    w_t = beta_t u_t solve a unit lower triangular system

        w_t + beta_t sum_{i<t} <k_t, exp(G_t - G_i) k_i> w_i = beta_t (v_t - S^T exp(G_t) k_t)

    and then  o_t = S^T exp(G_t) q_t + sum_{i<=t} <q_t, exp(G_t - G_i) k_i> w_i,
    S' = exp(G_end) S + sum_i exp(G_end - G_i) k_i w_i^T. Only the last line must run chunk after chunk.
    """
    batch, tokens, heads, _ = q.shape
    padded = -(-tokens // chunk) * chunk

    def by_chunk(x: jax.Array) -> jax.Array:  # [B, T, H, ...] -> [N, B, H, chunk, ...], zeros at the end
        x = jnp.pad(x, [(0, 0), (0, padded - tokens)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

    q, k, v, g, beta = (by_chunk(x) for x in (q, k, v, g, beta))
    decayed_products = _factored_products if bounded else _pairwise_products
    kk = jnp.tril(decayed_products(k, k, g), -1)  # [N, B, H, chunk, chunk]
    qk = jnp.tril(decayed_products(q, k, g))
    solve = _unit_lower_inverse(beta[..., None] * kk)
    total = jnp.cumsum(g, axis=-2)  # G [N, B, H, chunk, K]
    from_start = jnp.exp(total)
    w_own = _einsum("...ti,...iv->...tv", solve, beta[..., None] * v)
    w_old = _einsum("...ti,...ik->...tk", solve, beta[..., None] * from_start * k)  # w = w_own - w_old S
    to_end = jnp.exp(_sum_after(g)) * k

    def body(carry: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        w_own, w_old, to_end, end = part
        w = w_own - _einsum("bhtk,bhkv->bhtv", w_old, carry)
        return jnp.exp(end)[..., None] * carry + _einsum("bhtk,bhtv->bhkv", to_end, w), (carry, w)

    state, (before, w) = lax.scan(body, state, (w_own, w_old, to_end, total[..., -1, :]))
    o = _einsum("...tk,...kv->...tv", from_start * q, before) + _einsum("...ti,...iv->...tv", qk, w)
    o = jnp.moveaxis(jnp.moveaxis(o, 2, 3), 0, 1).reshape(batch, padded, heads, -1)
    return o[:, :tokens], state


def _factored_products(x: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
    """`<x_t, exp(G_t - G_i) k_i>` for t >= i (garbage above the diagonal): `[..., chunk, K]` to `[..., chunk, chunk]`.

    The exponential splits into two factors around the chunk's middle. With g >= -5 each is at most exp(5 chunk / 2):
    finite in float32 up to chunk 32.
    """
    total = jnp.cumsum(g, axis=-2)
    middle = total[..., g.shape[-2] // 2 - 1 : g.shape[-2] // 2, :]
    return _einsum("...tk,...ik->...ti", x * jnp.exp(total - middle), k * jnp.exp(middle - total))


def _pairwise_products(x: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
    """As `_factored_products` for decays without a bound: each `G_t - G_i` is summed by itself."""
    chunk = g.shape[-2]
    after = jnp.arange(chunk)[:, None] > jnp.arange(chunk)  # [t, i]
    span = jnp.cumsum(jnp.where(after[..., None], g[..., :, None, :], 0.0), axis=-3)  # [..., t, i, K]
    return jnp.sum(x[..., :, None, :] * k[..., None, :, :] * jnp.exp(span), axis=-1)


def _sum_after(g: jax.Array) -> jax.Array:
    """`G_end - G_i`, without the difference: `[..., chunk, K]`."""
    later = jnp.concatenate([g[..., 1:, :], jnp.zeros_like(g[..., :1, :])], axis=-2)
    return jnp.flip(jnp.cumsum(jnp.flip(later, -2), axis=-2), -2)


def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Inverse of `1 + lower`, `lower [..., n, n]` strictly lower triangular, n a power of two, by halves:
    the inverse of [[A, 0], [C, D]] is [[A', 0], [-D' C A', D']]."""
    n = lower.shape[-1]
    if n == 1:
        return jnp.ones_like(lower)
    half = n // 2
    corners = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
    first, last = _unit_lower_inverse(corners)
    below = -_einsum("...ij,...jk,...kl->...il", last, lower[..., half:, :half], first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, last], axis=-1)], axis=-2)


def _last_rows(history: jax.Array, rows: int, lengths: jax.Array | None) -> jax.Array:
    """The `rows` inputs before the next token: `history [B, rows+T, C]` holds `rows` old ones in front."""
    if lengths is None:
        return history[:, history.shape[1] - rows :]
    index = lengths[:, None] + jnp.arange(rows)  # [B, rows]
    return jnp.take_along_axis(history, index[..., None], axis=1)
