"""Branches inside the kernel."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def when(condition: jax.Array) -> Callable[[Callable[[], None]], None]:
    """Runs the decorated function if `condition` holds: `pl.when` as a loop of zero or one turns.

    To the TPU compiler the two are alike. In interpret mode a branch copies every buffer that it may write, caches and
    ring included, while a loop updates them in place.
    """

    def run(body: Callable[[], None]) -> None:
        lax.fori_loop(0, jnp.asarray(condition).astype(jnp.int32), lambda _, carry: body(), None)

    return run


def when_at(condition: jax.Array, index: jax.Array) -> Callable[[Callable[[jax.Array], None]], None]:
    """`when` for a function of `index`, which it receives through the loop.

    What the body loads at `index` then depends on the loop, so no compiler moves the loads out of the branch.
    """

    def run(body: Callable[[jax.Array], None]) -> None:
        lax.fori_loop(0, jnp.asarray(condition).astype(jnp.int32), lambda turn, carry: body(index + turn), None)

    return run
