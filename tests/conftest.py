"""Shared set-up of the tests."""

from __future__ import annotations

import jax
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Compiled launches are kept for the next run, and for the other workers of this one."""
    cache = getattr(config, "cache", None)
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax")))
