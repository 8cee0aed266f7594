"""Compiles a plan's launch for every core of a machine that is not there, in a process of its own."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import jax
from jax.experimental import topologies

from megakernel.mesh import core_mesh, on_mesh, shapes
from megakernel.plan import Plan

_TIMEOUT_SECONDS = 1800


def compile_on(topology: str, plan: Plan) -> dict[str, float]:
    """Seconds of the TPU compiler, and its own count of temporary bytes a core."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, __file__, topology]
    done = subprocess.run(
        command, input=pickle.dumps(plan), capture_output=True, env=environment, timeout=_TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _compile(topology: str, plan: Plan) -> dict[str, float]:
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    mesh = core_mesh(plan.split.cores, devices)
    lowered = jax.jit(on_mesh(plan, mesh, False), donate_argnums=1).lower(*shapes(plan, mesh))
    started = time.perf_counter()
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None
    return {
        "devices": len(devices),
        "compile_seconds": time.perf_counter() - started,
        "temp_bytes": analysis.temp_size_in_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], pickle.load(sys.stdin.buffer))))
