"""Where a module under construction takes its tensors from."""

from __future__ import annotations

from typing import Protocol

import jax


class Source(Protocol):
    """Gives the tensor with a name relative to the module, e.g. `q_proj.weight`, ready for use."""

    def __call__(self, name: str) -> jax.Array: ...


def below(source: Source, prefix: str) -> Source:
    """The part of `source` whose names begin with `prefix`."""
    return lambda name: source(prefix + name)
