"""Compiles a plan's launch for a TPU on a machine without one, and reads the compiler's figures.

The compiler runs in a process of its own: its settings must be there before it starts, and the caller's JAX never
loads it. The process does not touch a TPU, so it also runs beside one that is busy.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding

from megakernel import memory
from megakernel.backends import INSTALL_LIBTPU
from megakernel.mesh import core_mesh, on_mesh, shapes
from megakernel.plan import Plan
from megakernel.schedule import Loop, read_schedule, read_vmem
from megakernel.topology import Topology, TopologyError, smallest_topology

_TIMEOUT_SECONDS = 1800
_LONGEST_REASON = 600
_REPLY = "one-launch reply: "


class AotError(RuntimeError):
    """The launch cannot be compiled here, or the TPU compiler refused it; the message has the compiler's words."""


@dataclasses.dataclass(frozen=True)
class AotReport:
    """What the TPU compiler made of a plan. Bytes are of one core.

    Attributes:
      topology, cores: the machine compiled for, and how many of its cores share the model.
      lower_seconds, compile_seconds: on this machine.
      vmem_planned: the plan's own VMEM map; vmem_limit: what the core has. The compiler refuses what does not fit.
      vmem_compiled: what the compiler allocates for the kernel, its own scratch and spilled registers included, with
        `compile_for(..., schedule=True)`; None where it does not say.
      hbm_arguments: inputs of the launch, as the plan counts them.
      argument_bytes, output_bytes, alias_bytes, temp_bytes, code_bytes: the compiler's memory analysis.
      schedule: the kernel's loops, with `compile_for(..., schedule=True)`.
    """

    model: str
    target: str
    topology: str
    cores: int
    jax_version: str
    lower_seconds: float
    compile_seconds: float
    vmem_planned: int
    vmem_limit: int
    hbm_arguments: dict[str, int]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    vmem_compiled: int | None = None
    schedule: Loop | None = None

    def __str__(self) -> str:
        from megakernel.report import aot_text

        return aot_text(self)


def compile_for(plan: Plan, *, schedule: bool = False) -> AotReport:
    """Compiles the launch of `plan` with the real TPU compiler, for the smallest known machine with its cores.

    Args:
      schedule: also read the compiler's schedule; takes a few seconds more and about 100 MB of temporary files.

    Raises:
      AotError: no compiler for this target, libtpu is not installed, or the compiler refused the kernel.
      ScheduleError: the compiler's dump has another form than expected.
    """
    try:
        smallest_topology(plan.target, plan.split.cores)
    except TopologyError as error:
        raise AotError(str(error)) from error
    if importlib.util.find_spec("libtpu") is None:
        raise AotError(f"the TPU compiler (libtpu) is not installed: {INSTALL_LIBTPU}")
    if not schedule:
        return AotReport(**_run_compiler(plan, dump=None))
    with tempfile.TemporaryDirectory(prefix="one-launch-") as folder:
        found = _run_compiler(plan, dump=folder)
        dump = Path(folder)
        return AotReport(**found, vmem_compiled=read_vmem(dump), schedule=read_schedule(dump, plan))


def launch_arguments(plan: Plan, sharding: NamedSharding | None = None) -> tuple[dict[str, Any], ...]:
    """Shapes of the arrays that `kernel.launch(plan, ...)` takes: weights, caches, request."""
    return tuple(
        {name: jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype), sharding=sharding) for name, b in buffers.items()}
        for buffers in (memory.weight_buffers(plan), memory.cache_buffers(plan), memory.request_buffers(plan))
    )


def devices_of(topology: Topology) -> list[Any]:
    """The devices of a machine that is not there."""
    # JAX 0.10 assumes four chips a host unless told otherwise; later releases do not mind being told.
    one_chip = {"chips_per_host_bounds": [1, 1, 1]} if topology.one_chip else {}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **one_chip).devices)


def _run_compiler(plan: Plan, dump: str | None) -> dict[str, Any]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu is otherwise one process's at a time, TPU or not
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    if dump is not None:
        ours = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
        environment["LIBTPU_INIT_ARGS"] = f"{environment.get('LIBTPU_INIT_ARGS', '')} {ours}".strip()
    command = [sys.executable, "-c", "from megakernel.aot import _compiler_process; _compiler_process()"]
    try:
        done = subprocess.run(
            command, input=pickle.dumps(plan), capture_output=True, env=environment, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise AotError(f"compiling {plan.config.name} took more than {_TIMEOUT_SECONDS} s") from error
    replies = [line for line in done.stdout.decode().splitlines() if line.startswith(_REPLY)]
    if not replies:
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["(no message)"]
        raise AotError(f"the compiler's process ended with code {done.returncode}: {words[0]}")
    reply = json.loads(replies[-1].removeprefix(_REPLY))
    if "refused" in reply:
        raise AotError(f"{plan.config.name} on {plan.target.name}: the TPU compiler refused it: {reply['refused']}")
    return reply


def _compiler_process() -> None:
    """Runs in the compiler's process: plan on standard input, one JSON line on standard output."""
    plan: Plan = pickle.load(sys.stdin.buffer)
    try:
        reply = _compile(plan)
    except Exception as error:  # whatever the compiler raises is the answer
        reply = {"refused": short_reason(str(error))}
    print(_REPLY + json.dumps(reply), flush=True)


def short_reason(message: str) -> str:
    """The compiler's message in one line: its first sentence and, when memory ran out, what took most of it."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = lines[0] if lines else "(no message)"
    for line in lines[1:]:
        if not reason.endswith(":"):
            break
        reason += f" {line}"
    details = [line for line in lines if line.startswith(("1. Size:", "Shape:", "XLA label:"))]
    if "Largest program allocations" in message and details:
        largest = [details[0].removeprefix("1. "), *(line for line in details[1:2] if "=" not in line)]
        reason += f" Largest: {', '.join(largest)}"
    return reason if len(reason) <= _LONGEST_REASON else reason[: _LONGEST_REASON - 4] + " ..."


def _compile(plan: Plan) -> dict[str, Any]:
    topology = smallest_topology(plan.target, plan.split.cores)
    mesh = core_mesh(plan.split.cores, devices_of(topology))
    started = time.perf_counter()
    lowered = jax.jit(on_mesh(plan, mesh, interpret=False), donate_argnums=1).lower(*shapes(plan, mesh))
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    compiled_at = time.perf_counter()
    analysis: Any = compiled.memory_analysis()
    return {
        "model": plan.config.name,
        "target": plan.target.name,
        "topology": topology.name,
        "cores": plan.split.cores,
        "jax_version": jax.__version__,
        "lower_seconds": lowered_at - started,
        "compile_seconds": compiled_at - lowered_at,
        "vmem_planned": sum(plan.vmem_map.values()),
        "vmem_limit": plan.target.vmem_bytes,
        "hbm_arguments": plan.hbm_map,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
        "alias_bytes": analysis.alias_size_in_bytes,
        "temp_bytes": analysis.temp_size_in_bytes,
        "code_bytes": analysis.generated_code_size_in_bytes,
    }
