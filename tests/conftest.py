"""Shared set-up of the tests."""

from __future__ import annotations

import os

import jax
import pytest

CORES = 8
"""CPU devices, for kernels that run on several cores; all others use the first."""


def pytest_configure(config: pytest.Config) -> None:
    """Compiled launches are kept for the next run, and for the other workers of this one."""
    # Simulated cores wait for each other inside callbacks: each needs threads of its own.
    os.environ.setdefault("NPROC", str(2 * CORES))
    jax.config.update("jax_num_cpu_devices", CORES)
    cache = getattr(config, "cache", None)
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax")))
