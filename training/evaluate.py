"""Held-out bits per byte of a model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from model.reference import Model, forward
from model.tokenizer import Tokenizer
from training.data import encode_documents, evaluation_windows


def bits_per_byte(
    model: Model, documents: list[str], tokenizer: Tokenizer, eos: int, length: int = 1024, batch: int = 8
) -> float:
    """Negative log2 likelihood of all documents per UTF-8 byte.

    Each document starts from the end-of-text token; a token sees at least `length / 2` tokens before it, or all of
    its document.
    """
    windows, counts = evaluation_windows(encode_documents(documents, tokenizer), eos, length)
    total = 0.0
    for begin in range(0, len(windows), batch):
        rows = min(batch, len(windows) - begin)
        window = np.concatenate([windows[begin : begin + rows], np.full((batch - rows, length + 1), eos, np.int32)])
        count = np.concatenate([counts[begin : begin + rows], np.zeros((batch - rows, length), bool)])
        total += float(_nats(model, window, count))
    return total / np.log(2) / sum(len(document.encode()) for document in documents)


@jax.jit
def _nats(model: Model, window: jax.Array, count: jax.Array) -> jax.Array:
    losses = token_losses(forward(model, window[:, :-1]), window[:, 1:])
    return jnp.sum(jnp.where(count, losses, 0.0))


@functools.partial(jax.jit, inline=True)
def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log likelihood in nats: `logits [..., V]`, `targets [...]`, `[...]`."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
