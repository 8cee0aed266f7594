"""Attention residuals: the residual stream as a softmax over its own history.

Sublayers do not add to one stream for ever. The running sum `prefix` is frozen into a list of snapshots at the start
of each block of layers and begins anew, and every sublayer reads a mixture of snapshots and prefix, weighted for each
token by a learned score. A model without attention residuals reads and extends one running sum.
Source: Attention Residuals (Moonshot AI, 2026) and the code of Kimi K3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from model.primitives import Trace, Weight, einsum_f32, record, rounded


class ResidualStream:
    """The stream of one forward pass. Not a module: it holds values, not weights."""

    def __init__(self, embedded: jax.Array, eps: float, trace: Trace | None = None) -> None:
        self.snapshots: list[jax.Array] = []
        self._sum: jax.Array | None = embedded
        self.eps, self.trace = eps, trace

    @property
    def prefix(self) -> jax.Array:
        """The running sum; there is none between `freeze` and the next `add`."""
        assert self._sum is not None
        return self._sum

    def freeze(self) -> None:
        """Starts a block: the prefix becomes a snapshot, the next sum begins with the next sublayer's output."""
        self.snapshots.append(self.prefix)
        self._sum = None

    def add(self, output: jax.Array) -> None:
        self._sum = output if self._sum is None else rounded(self._sum + output, output.dtype)

    def read(self, norm: Weight, proj: Weight) -> jax.Array:
        """`softmax_j(<v_j / rms(v_j), norm * proj>)` over snapshots and prefix `v_j [..., D]`; the raw `v_j` are mixed.

        `norm [D]`, `proj [1, D]`. All in float32, one rounding at the end.
        """
        values = jnp.stack([*self.snapshots, self.prefix], axis=-2).astype(jnp.float32)  # [..., m, D]
        direction = norm[...].astype(jnp.float32) * proj[...][0].astype(jnp.float32)
        scores = einsum_f32("...md,d->...m", values, direction)
        scores *= lax.rsqrt(jnp.mean(values * values, axis=-1) + self.eps)
        weights = jax.nn.softmax(scores, axis=-1)
        record(self.trace, "attn_res_probs", weights)
        return rounded(einsum_f32("...m,...md->...d", weights, values), self.prefix.dtype)
