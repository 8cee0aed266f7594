"""Compiled launches kept between runs, through JAX's persistent compilation cache."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def use_compile_cache() -> None:
    """Points JAX at a cache folder, unless the user has chosen one or switched the cache off.

    The folder is `$XDG_CACHE_HOME/one-launch` or `~/.cache/one-launch`.
    """
    chosen = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009  (attributes that type checkers cannot see)
    enabled = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009
    if chosen is not None or not enabled:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(base / "one-launch"))
