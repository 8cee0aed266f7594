"""Shared set-up of the tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import against_plain
import against_reference
import jax
import launching
import pytest

MOST_MAPPED = 30_000
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


@pytest.fixture(autouse=True)
def free_compiled_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets go of what tests have compiled before it is too much: Linux lets a process map 65,530 pieces of memory, a
    compiled launch takes more than a thousand, and who runs out ends with a segmentation fault."""
    yield
    if _mapped_pieces() > MOST_MAPPED:
        for module in (request.module, launching, against_plain, against_reference):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
        jax.clear_caches()
        gc.collect()


def _mapped_pieces() -> int:
    listing = Path("/proc/self/maps")
    return len(listing.read_bytes().splitlines()) if listing.is_file() else 0
