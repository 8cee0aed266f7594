"""Muon for matrices, Adam for the rest, decoupled weight decay; parameters are a flat dict.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest orthogonal matrix, scaled to the step size of
Adam as in Moonlight (arXiv 2502.16982). Stacked experts `[E, out, in]` are orthogonalised one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """is_matrix: which names Muon takes. is_decayed: which names the weight decay takes."""

    is_matrix: Callable[[str], bool]
    is_decayed: Callable[[str], bool]
    weight_decay: float
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    def init(self, params: Params) -> dict[str, Any]:
        zeros = {name: jnp.zeros_like(p) for name, p in params.items()}
        second = {name: jnp.zeros_like(p) for name, p in params.items() if not self.is_matrix(name)}
        return {"first": zeros, "second": second, "count": jnp.zeros((), jnp.int32)}

    def update(
        self, params: Params, grads: Params, state: dict[str, Any], rate: jax.Array, adam_rate: jax.Array
    ) -> tuple[Params, dict[str, Any]]:
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
        scale = jnp.minimum(1.0, self.clip / (norm + 1e-6))
        count = state["count"] + 1
        first, second, new = {}, {}, {}
        b1, b2 = self.betas
        for name, param in params.items():
            grad = grads[name] * scale
            if self.is_matrix(name):
                first[name] = self.momentum * state["first"][name] + (1 - self.momentum) * grad
                nesterov = self.momentum * first[name] + (1 - self.momentum) * grad
                direction = orthogonalize(nesterov) * (0.2 * max(param.shape[-2:]) ** 0.5)
                step = rate
            else:
                first[name] = b1 * state["first"][name] + (1 - b1) * grad
                second[name] = b2 * state["second"][name] + (1 - b2) * grad * grad
                root = jnp.sqrt(second[name] / (1 - b2**count)) + 1e-9
                direction = first[name] / (1 - b1**count) / root
                step = adam_rate
            if self.is_decayed(name):
                direction = direction + self.weight_decay * param
            new[name] = param - step * direction
        return new, {"first": first, "second": second, "count": count}


def orthogonalize(matrix: jax.Array) -> jax.Array:
    """Five Newton-Schulz steps towards the nearest (semi-)orthogonal matrix; `[..., m, n]`."""
    x = matrix.astype(jnp.bfloat16)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True) + 1e-7).astype(x.dtype)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x if wide else x.mT).astype(matrix.dtype)
